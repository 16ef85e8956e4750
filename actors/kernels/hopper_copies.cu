// What is copied into shared memory, where it lies there, and the two kinds of warps that copy.
// Part of hopper.cu.
//
// Of a head the first 64 columns lie in shared memory as rows of 128 bytes, swizzled. Of values the
// other 8 or 16 and a column of ones are in a second lot of such rows, since one product reads
// both; of queries and keys they lie apart, in rows of their own.

constexpr int REST = CHUNKS - 8;  // chunks of 8 columns behind the first 64
constexpr int LOT = KEYS * 128;
constexpr int STAGE_BYTES = LOT + (REST ? 2 * LOT : LOT);
constexpr int KEY_REST = KEYS * REST * 16, QUERY_REST = 64 * REST * 16;  // bytes
constexpr int BLOCK_BYTES = KEYS * SIZE * 2;  // copied
constexpr int QUERY_LOT = 64 * 128;
constexpr int ONES_BYTES = REST ? 0 : 16 * 128;
constexpr int WARPS = 4 * GROUPS;
struct Maps {
    TensorMap block, queries, values_rest, keys_rest, queries_rest;
};

// In shared memory: stages of keys and values, queries, a lot of ones, and what else there is of
// keys and of queries. `scratch` is the queries' place.
struct Ring {
    u32 tiles, scratch, ones, keys_rest, queries_rest;
    u32 full_k, full_v, empty_k, empty_v, full_q, empty_q;
    u64 keys, keys_last, values;  // descriptors of the first stage
    DEVICE Ring(u32 memory, u32 barriers)
        : tiles(memory),
          scratch(memory + STAGES * STAGE_BYTES),
          ones(scratch + GROUPS * QUERY_LOT),
          keys_rest(ones + ONES_BYTES),
          queries_rest(keys_rest + STAGES * KEY_REST),
          full_k(barriers),
          full_v(full_k + 8 * STAGES),
          empty_k(full_v + 8 * STAGES),
          empty_v(empty_k + 8 * STAGES),
          full_q(empty_v + 8 * STAGES),
          empty_q(full_q + 8 * GROUPS),
          keys(swizzled(uniform(tiles), 0)),
          keys_last(narrow(uniform(keys_rest), REST * 16)),
          values(swizzled(uniform(tiles + LOT), REST ? LOT : uniform(ones - tiles - LOT))) {}
    DEVICE u32 v(Place place) const { return tiles + place.stage * STAGE_BYTES + LOT; }
    DEVICE u32 q(int group) const { return scratch + group * QUERY_LOT; }
    DEVICE u32 q_rest(int group) const { return queries_rest + group * QUERY_REST; }
    DEVICE void wait_k(Place place) const { barrier_wait(full_k + 8 * place.stage, place.parity); }
    DEVICE void wait_v(Place place) const { barrier_wait(full_v + 8 * place.stage, place.parity); }
    DEVICE void free_k(Place place) const { barrier_arrive(empty_k + 8 * place.stage); }
    DEVICE void free_v(Place place) const { barrier_arrive(empty_v + 8 * place.stage); }
    DEVICE void initialise() const {
        for (int i = 0; i < GROUPS; i++) {
            barrier_init(full_q + 8 * i, 1);
            barrier_init(empty_q + 8 * i, 4);
        }
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full_k + 8 * i, 1);
            barrier_init(full_v + 8 * i, 1);
            barrier_init(empty_k + 8 * i, WARPS);
            barrier_init(empty_v + 8 * i, WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
};

// Where 8 columns of a row lie in lots of KEYS rows.
DEVICE u32 chunk_at(int row, int chunk) {
    return chunk / 8 * LOT + row * 128 + (chunk ^ row) % 8 * 16;
}

// Where 8 columns of a row lie behind the first 64, of queries and keys.
DEVICE u32 rest_at(int row, int chunk) {
    return REST > 1 ? row * 32 + (chunk ^ row / 4 % 2) * 16 : row * 16;
}

DEVICE void copy_block(const Maps& maps, const Ring& ring, Place place, int k, int v, int row) {
    u32 to = ring.tiles + place.stage * STAGE_BYTES, full = ring.full_k + 8 * place.stage;
    barrier_wait(ring.empty_k + 8 * place.stage, place.parity ^ 1);
    barrier_expect(full, BLOCK_BYTES);
    tensor_copy(to, maps.block, k, row, full);
    if (REST) tensor_copy(ring.keys_rest + place.stage * KEY_REST, maps.keys_rest, k + 64, row, full);
    full = ring.full_v + 8 * place.stage;
    barrier_wait(ring.empty_v + 8 * place.stage, place.parity ^ 1);
    barrier_expect(full, BLOCK_BYTES);
    tensor_copy(to + LOT, maps.block, v, row, full);
    if (REST) tensor_copy(to + 2 * LOT, maps.values_rest, v + 64, row, full);
}

DEVICE void copy_blocks(const Maps& maps, const int4* table, const Plan& plan, const Ring& ring) {
    Place place;
    int4 entry = plan.entry(table, blockIdx.x);
    for (int item = blockIdx.x; item < plan.items; item += gridDim.x) {
        Work work(plan, item, entry);
        entry = plan.entry(table, item + gridDim.x);
        if (work.strips == 0) continue;
        // Blocks of one head begin at different keys, so as not to crowd the same lines of the L2.
        int whole = work.blocks() - 1, at = item % max(whole, 1);
        int k = (plan.heads + work.head) * SIZE, v = k + plan.heads * SIZE;
        for (int i = 0; i < (work.kept() ? 1 : work.strips); i += GROUPS)
            for (int block = 0; block <= whole; block++) {
                int row = work.start + (block ? at : whole) * KEYS;
                if (block && ++at == whole) at = 0;
                copy_block(maps, ring, place, k, v, row);
                place.next();
            }
    }
}

DEVICE void copy_queries(const Maps& maps, const int4* table, const Plan& plan, const Ring& ring,
                         int group) {
    u32 parity = 1, full = ring.full_q + 8 * group, empty = ring.empty_q + 8 * group;
    int turn = 0;
    int4 entry = plan.entry(table, blockIdx.x);
    for (int item = blockIdx.x; item < plan.items; item += gridDim.x) {
        Work work(plan, item, entry);
        entry = plan.entry(table, item + gridDim.x);
        int column = work.head * SIZE;
        for (int i = work.first(group, turn); i < work.strips; i += GROUPS) {
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
