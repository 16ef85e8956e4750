// The producer side of attention.cu: the layout of shared memory, and the two kinds of producer
// warps.
//
// The first 64 columns of a head are stored in shared memory as swizzled rows of 128 bytes; a group
// of such rows is a lot. For values, the other 8 or 16 columns and a column of ones follow in a
// second lot, because one GEMM reads both. For queries and keys, the other columns are stored
// elsewhere, in rows of their own. If PAD, these columns of the keys are followed by ones, which
// all keys share.

constexpr int CHUNKS = SIZE / 8;
constexpr int REST = CHUNKS - 8;  // chunks of 8 columns after the first 64
constexpr int LOT = KEYS * 128;
constexpr int STAGE_BYTES = LOT + (REST ? 2 * LOT : LOT);
constexpr int KEY_REST = KEYS * REST * 16, QUERY_REST = 64 * REST * 16;  // bytes
constexpr int BLOCK_BYTES = KEYS * SIZE * 2;  // copied by TMA
constexpr int QUERY_LOT = 64 * 128;
constexpr int ONES_BYTES = REST ? 0 : 16 * 128;
constexpr int WARPS = 4 * GROUPS;
constexpr int COPIED = KEYS / CLUSTER;  // keys of a stage that each CTA copies for its cluster
struct Maps {
    TensorMap block, queries, values_rest, keys_rest, queries_rest;
};

// Shared memory: the stages of keys and values; queries; a lot with the column of ones; the other
// columns of keys and queries; and the ones that pad keys. `scratch` is the memory of the queries.
struct Ring {
    u32 tiles, scratch, ones, keys_rest, queries_rest, units;
    u32 full_k, full_v, empty_k, empty_v, full_q, empty_q, freed;
    u32 keys, keys_last, values;  // low words of the descriptors of the first stage
    int rank;
    DEVICE Ring(u32 memory, u32 barriers)
        : tiles(memory),
          scratch(memory + STAGES * STAGE_BYTES),
          ones(scratch + GROUPS * QUERY_LOT),
          keys_rest(ones + ONES_BYTES),
          queries_rest(keys_rest + STAGES * KEY_REST),
          units(queries_rest + GROUPS * QUERY_REST),
          full_k(barriers),
          full_v(full_k + 8 * STAGES),
          empty_k(full_v + 8 * STAGES),
          empty_v(empty_k + 8 * STAGES),
          full_q(empty_v + 8 * STAGES),
          empty_q(full_q + 8 * GROUPS),
          freed(empty_k),
          keys(low_word(uniform(tiles), 0)),
          keys_last(low_word(uniform(keys_rest), PAD ? uniform(units - keys_rest) : 0)),
          values(low_word(uniform(tiles + LOT), REST ? LOT : uniform(ones - tiles - LOT))),
          rank(0) {
        if (CLUSTER > 1) {
            rank = cluster_rank();
            freed = cluster_address(empty_k, threadIdx.x % CLUSTER);
        }
    }
    DEVICE u32 v(Place place) const { return tiles + place.stage * STAGE_BYTES + LOT; }
    DEVICE u32 q(int group) const { return scratch + group * QUERY_LOT; }
    DEVICE u32 q_rest(int group) const { return queries_rest + group * QUERY_REST; }
    DEVICE void wait_k(Place place) const { barrier_wait(full_k + 8 * place.stage, place.parity); }
    DEVICE void wait_v(Place place) const { barrier_wait(full_v + 8 * place.stage, place.parity); }
    // Called by the first CLUSTER lanes of every consumer warp, each for one CTA of the cluster.
    DEVICE void free_k(Place place) const { release(freed + 8 * place.stage); }
    DEVICE void free_v(Place place) const { release(freed + 8 * STAGES + 8 * place.stage); }
    DEVICE static void release(u32 barrier) {
        if (CLUSTER > 1) barrier_arrive_at(barrier);
        else barrier_arrive(barrier);
    }
    DEVICE void initialise() const {
        for (int i = 0; i < GROUPS; i++) {
            barrier_init(full_q + 8 * i, 1);
            barrier_init(empty_q + 8 * i, 4);
        }
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full_k + 8 * i, 1);
            barrier_init(full_v + 8 * i, 1);
            barrier_init(empty_k + 8 * i, WARPS * CLUSTER);
            barrier_init(empty_v + 8 * i, WARPS * CLUSTER);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
};

// The offset of a chunk of 8 columns of a row, in lots of KEYS rows.
DEVICE u32 chunk_at(int row, int chunk) {
    return chunk / 8 * LOT + row * 128 + (chunk ^ row) % 8 * 16;
}

// The offset of a chunk of the columns after the first 64, of queries and keys.
DEVICE u32 rest_at(int row, int chunk) {
    return REST > 1 ? row * 32 + (chunk ^ row / 4 % 2) * 16 : row * 16;
}

DEVICE void copy_rows(u32 to, const TensorMap& map, int column, int row, u32 barrier) {
    if (CLUSTER > 1) tensor_copy_to_all(to, map, column, row, barrier, CLUSTER);
    else tensor_copy(to, map, column, row, barrier);
}

// Each CTA of a cluster copies a part of the rows to all CTAs.
DEVICE void copy_block(const Maps& maps, const Ring& ring, Place place, int k, int v, int row) {
    u32 to = ring.tiles + place.stage * STAGE_BYTES + ring.rank * COPIED * 128;
    u32 full = ring.full_k + 8 * place.stage;
    row += ring.rank * COPIED;
    barrier_wait(ring.empty_k + 8 * place.stage, place.parity ^ 1);
    barrier_expect(full, BLOCK_BYTES);
    copy_rows(to, maps.block, k, row, full);
    if (REST)
        copy_rows(ring.keys_rest + place.stage * KEY_REST + ring.rank * COPIED * REST * 16,
                  maps.keys_rest, k + 64, row, full);
    full = ring.full_v + 8 * place.stage;
    barrier_wait(ring.empty_v + 8 * place.stage, place.parity ^ 1);
    barrier_expect(full, BLOCK_BYTES);
    copy_rows(to + LOT, maps.block, v, row, full);
    if (REST) copy_rows(to + 2 * LOT, maps.values_rest, v + 64, row, full);
}

DEVICE void copy_blocks(const Maps& maps, const int4* table, const Plan& plan, const Ring& ring) {
    Place place;
    int4 entry = plan.entry(table, plan.begin);
    for (int item = plan.begin; item < plan.end; item += plan.crews) {
        Work work(plan, item, entry);
        entry = plan.entry(table, item + plan.crews);
        if (work.strips == 0) continue;
        int k = (plan.heads + work.head) * SIZE, v = k + plan.heads * SIZE;
        for (int i = 0; i < (work.kept() ? 1 : work.strips); i += TOGETHER)
#pragma unroll 1
            for (int index = 0; index < work.blocks(); index++) {
                copy_block(maps, ring, place, k, v, work.start + work.at(index) * KEYS);
                place.next();
            }
    }
}

DEVICE void copy_queries(const Maps& maps, const int4* table, const Plan& plan, const Ring& ring,
                         int group) {
    u32 parity = 1, full = ring.full_q + 8 * group, empty = ring.empty_q + 8 * group;
    int turn = 0;
    int4 entry = plan.entry(table, plan.begin);
    for (int item = plan.begin; item < plan.end; item += plan.crews) {
        Work work(plan, item, entry);
        entry = plan.entry(table, item + plan.crews);
        int column = work.head * SIZE;
        for (int i = work.first(ring.rank, group, turn); i < work.strips; i += TOGETHER) {
            barrier_wait(empty, parity);
            parity ^= 1;
            barrier_expect(full, 64 * SIZE * 2);
            tensor_copy(ring.q(group), maps.queries, column, work.row + 64 * i, full);
            if (REST)
                tensor_copy(ring.q_rest(group), maps.queries_rest, column + 64, work.row + 64 * i,
                            full);
        }
        turn = work.next(turn);
    }
}
