// Attention within segments of a packed sequence, over the table of hopper_tiles.py, on compute
// capability 9.0. hopper.py compiles it at run time behind the other files of its name and the
// products that it writes itself, and defines ELEMENT, TYPE, SIZE, GROUPS, KEYS, STAGES and SCALE.
//
// A block stays on its processor and takes item after item. One warp copies keys and values into a
// ring of stages, one for each computing warp group its queries. Three groups compute 64 queries
// each: while one goes through the softmax, the products of the others run. Three, because each
// block of keys crosses the L2 cache once for all of them: 64 queries a block of keys would ask
// more than the cache can give. Where all keys of a segment fit into the ring they stay there until
// all queries of the item have met them, and the groups need not wait for each other.
//
// Of a head the first 64 columns lie in shared memory as rows of 128 bytes, swizzled. Of values the
// other 8 or 16 and a column of ones are in a second lot of such rows, since one product reads
// both; of queries and keys they lie apart, 16 bytes a row.

constexpr int SLICES = (CHUNKS + 1) / 2;
constexpr int REST = CHUNKS - 8;  // chunks of 8 columns behind the first 64
constexpr int LOT = KEYS * 128;
constexpr int STAGE_BYTES = LOT + (REST ? 2 * LOT : LOT);
constexpr int KEY_REST = KEYS * 16, QUERY_REST = 64 * 16;  // bytes of such a chunk
constexpr int BLOCK_BYTES = KEYS * SIZE * 2;  // copied
constexpr int QUERY_LOT = 64 * 128;
constexpr int ONES_BYTES = REST ? 0 : 16 * 128;
constexpr int WARPS = 4 * GROUPS;
constexpr int COPYING_REGISTERS = 32;
constexpr int COMPUTING_REGISTERS = 160;
struct Maps {
    TensorMap block, queries, values_rest, keys_rest, queries_rest;
};

// In shared memory: stages of keys and values, queries, a lot of ones, and what else there is of
// keys and of queries. `scratch` is the queries' place.
struct Ring {
    u32 tiles, scratch, ones, keys_rest, queries_rest;
    u32 full_k, full_v, empty_k, empty_v, full_q, empty_q;
    DEVICE Ring(u32 memory, u32 barriers)
        : tiles(memory),
          scratch(memory + STAGES * STAGE_BYTES),
          ones(scratch + GROUPS * QUERY_LOT),
          keys_rest(ones + ONES_BYTES),
          queries_rest(keys_rest + STAGES * REST * KEY_REST),
          full_k(barriers),
          full_v(full_k + 8 * STAGES),
          empty_k(full_v + 8 * STAGES),
          empty_v(empty_k + 8 * STAGES),
          full_q(empty_v + 8 * STAGES),
          empty_q(full_q + 8 * GROUPS) {}
    DEVICE u32 k(Place place) const { return uniform(tiles + place.stage * STAGE_BYTES); }
    DEVICE u32 k_rest(Place place) const {
        return uniform(keys_rest + place.stage * REST * KEY_REST);
    }
    DEVICE u32 v(Place place) const { return k(place) + LOT; }
    DEVICE u32 q(int group) const { return scratch + group * QUERY_LOT; }
    DEVICE u32 q_rest(int group) const { return queries_rest + group * REST * QUERY_REST; }
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

// One chunk a copy.
DEVICE void copy_rest(u32 to, const TensorMap& map, int bytes, int column, int row, u32 barrier) {
#pragma unroll
    for (int i = 0; i < REST; i++)
        tensor_copy(to + i * bytes, map, column + 64 + 8 * i, row, barrier);
}

DEVICE void copy_block(const Maps& maps, const Ring& ring, Place place, int k, int v, int row) {
    u32 to = ring.tiles + place.stage * STAGE_BYTES, full = ring.full_k + 8 * place.stage;
    barrier_wait(ring.empty_k + 8 * place.stage, place.parity ^ 1);
    barrier_expect(full, BLOCK_BYTES);
    tensor_copy(to, maps.block, k, row, full);
    copy_rest(ring.keys_rest + place.stage * REST * KEY_REST, maps.keys_rest, KEY_REST, k, row, full);
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
            copy_rest(ring.q_rest(group), maps.queries_rest, QUERY_REST, column, work.row + 64 * i,
                      full);
        }
        turn = work.next(turn);
    }
}

DEVICE void scores_begin(float (&s)[KEYS / 2], const u32 (&q)[SLICES * 4], const Ring& ring,
                         Place place) {
    u64 keys = swizzled(ring.k(place), 0), rest = plain(ring.k_rest(place), (REST - 1) * KEY_REST);
#pragma unroll
    for (int i = 0; i < SLICES; i++)
        multiply_qk(s, q[4 * i], q[4 * i + 1], q[4 * i + 2], q[4 * i + 3], i < 4 ? keys + i * 2 : rest,
                    i > 0);
    products_commit();
}

DEVICE void sums_begin(float (&o)[COLUMNS / 2], const u32 (&p)[KEYS / 4], const Ring& ring,
                       Place place) {
    u32 v = ring.v(place);
    u64 values = swizzled(v, REST ? LOT : ring.ones - v);
    // All 16 rows of a slice have the same ones.
    constexpr u64 STEP = (u64)(16 * 128 / 16) - (REST ? 0 : (u64)(16 * 128 / 16) << 16);
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++)
        multiply_pv(o, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3], values + i * STEP, 1);
    products_commit();
}

// Values of keys beyond the segment become zero: their weights are, but what lies there may be NaN.
DEVICE void clear_values(u32 v, int from, int group, int thread) {
    for (int i = from * CHUNKS + thread; i < KEYS * CHUNKS; i += 128)
        store16(v + chunk_at(i / CHUNKS, i % CHUNKS), 0, 0);
    publish();
    meet<128>(1 + group);
}

DEVICE void mask(float (&s)[KEYS / 2], int keys, int thread) {
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++)
        if (i / 4 * 8 + thread % 4 * 2 + i % 2 >= keys) s[i] = -INFINITY;
}

DEVICE void pack(u32 (&p)[KEYS / 4], const float (&s)[KEYS / 2]) {
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) p[i] = pair(s[2 * i], s[2 * i + 1]);
}

// The slices' first chunk lies in two of the four matrices, rows 0 to 7 and 8 to 15 of the warp.
DEVICE void load_queries(u32 (&q)[SLICES * 4], const Ring& ring, int group, int thread) {
    int row = thread / 32 * 16 + thread % 16, second = thread % 32 / 16;
#pragma unroll
    for (int i = 0; i < 4; i++)
        load_matrices(q + 4 * i, ring.q(group) + chunk_at(row, 2 * i + second));
    if constexpr (REST > 0)
        load_matrices(q + 16, ring.q_rest(group) + (second * (REST - 1) * 64 + row) * 16);
    if constexpr (REST == 1) q[4 * SLICES - 2] = q[4 * SLICES - 1] = 0;
}

DEVICE void skip(const Ring& ring, Place& place, int blocks) {
#pragma unroll 1
    for (; blocks > 0; blocks--) {
        ring.wait_k(place);
        ring.wait_v(place);
        if (threadIdx.x % 32 == 0) {
            ring.free_k(place);
            ring.free_v(place);
        }
        place.next();
    }
}

// Sums of every stride-th of the item's blocks, from `first` on. `last`: no strip of this group
// comes back to these blocks.
DEVICE void compute(const Ring& ring, Place& place, const Work& work, const u32 (&q)[SLICES * 4],
                    float (&o)[COLUMNS / 2], Softmax& softmax, int first, int stride, bool last,
                    int thread) {
    float s[KEYS / 2];
    u32 p[KEYS / 4];
    int blocks = work.blocks(), block = first + stride;
    bool frees = last && thread % 32 == 0;
    ring.wait_k(place);
    products_begin();
    scores_begin(s, q, ring, place);
    bool partial = first == 0 && work.last_keys() < KEYS;
    if (partial) {
        ring.wait_v(place);
        clear_values(ring.v(place), work.last_keys(), threadIdx.x / 128 - 1, thread);
    }
    products_wait<0>();
    pin(s);
    if (frees) ring.free_k(place);
    if (partial) mask(s, work.last_keys(), thread);
    softmax.step(s);
    pack(p, s);
    ring.wait_v(place);
    for (; block < blocks; block += stride) {
        Place here = place;
        place.next();
        skip(ring, place, stride - 1);
        ring.wait_k(place);
        products_begin();
        scores_begin(s, q, ring, place);
        sums_begin(o, p, ring, here);
        products_wait<1>();
        pin(s);
        if (frees) ring.free_k(place);
        softmax.step(s);
        pin(s);
        // This wait stands here, and not before the products that need it, because the compiler
        // moves the next one upwards, before the softmax, unless a branch lies between.
        ring.wait_v(place);
        products_wait<0>();
        pin(o);
        if (frees) ring.free_v(here);
        softmax.rescale(o);
        pack(p, s);
    }
    products_begin();
    sums_begin(o, p, ring, place);
    products_wait<0>();
    pin(o);
    if (frees) ring.free_v(place);
    place.next();
    skip(ring, place, blocks - 1 - (block - stride));
}

DEVICE void compute_all(ELEMENT* qkv, const int4* table, const Plan& plan, const Ring& ring,
                        int group, int thread) {
    float o[COLUMNS / 2];
    u32 q[SLICES * 4], parity = 0;
    int turn = 0;
    Place place;
    int4 entry = plan.entry(table, blockIdx.x);
    for (int item = blockIdx.x; item < plan.items; item += gridDim.x) {
        Work work(plan, item, entry);
        // The next one's, long before it is looked at.
        entry = plan.entry(table, item + gridDim.x);
        if (work.strips == 0) continue;
        Place begin = place;
        int blocks = work.blocks();
        for (int round = 0; round < work.strips; round += GROUPS) {
            int strip = round + work.first(group, turn);
            if (strip >= work.strips) {
                if (!work.kept() || round == 0) skip(ring, place, blocks);
                continue;
            }
            if (work.kept()) place = begin;
            barrier_wait(ring.full_q + 8 * group, parity);
            parity ^= 1;
            load_queries(q, ring, group, thread);
            Softmax softmax;
#pragma unroll
            for (int i = 0; i < COLUMNS / 2; i++) o[i] = 0;
            int first = work.shared ? min(group, blocks) : 0;
            skip(ring, place, first);
            if (first < blocks)
                compute(ring, place, work, q, o, softmax, first, work.shared ? GROUPS : 1,
                        !work.kept() || strip + GROUPS >= work.strips, thread);
            // Shared strips meet in the queries' place. And only a product that has ended shows that
            // the queries are in registers: freed right behind their loads, they are overwritten.
            if (work.shared) merge(ring.scratch, o, softmax, group, thread);
            if (thread % 32 == 0) barrier_arrive(ring.empty_q + 8 * group);
            if (!work.shared || group == 0)
                store(qkv, plan.heads, work, work.row + 64 * strip, o, thread);
        }
        turn = work.next(turn);
    }
}

extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), 1)
    attend(ELEMENT* qkv, const int4* table, const __grid_constant__ Maps maps, int heads) {
    extern __shared__ unsigned char memory[];
    __shared__ u64 barriers[4 * STAGES + 2 * GROUPS];
    // The swizzle follows from addresses: whole 1024 bytes.
    Ring ring((shared_address(memory) + 1023) & ~1023u, shared_address(barriers));
    if (threadIdx.x == 0) {
        ring.initialise();
        prefetch(maps.block);
        prefetch(maps.queries);
    }
    for (int i = threadIdx.x; i < (REST ? STAGES * KEYS : 16); i += 128 * (GROUPS + 1))
        store16(REST ? ring.tiles + i / KEYS * STAGE_BYTES + LOT + chunk_at(i % KEYS, CHUNKS)
                     : ring.ones + chunk_at(i, 0),
                pair(1, 0), 0);
    publish();
    Plan plan(table, heads);
    __syncthreads();
    depend_wait();
    int group = uniform(threadIdx.x / 128), thread = threadIdx.x % 128;
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COPYING_REGISTERS));
        int warp = uniform(thread / 32);
        if (thread == 0) copy_blocks(maps, table, plan, ring);
        else if (thread % 32 == 0) copy_queries(maps, table, plan, ring, warp - 1);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COMPUTING_REGISTERS));
        compute_all(qkv, table, plan, ring, group - 1, thread);
    }
}
