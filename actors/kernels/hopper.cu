// Attention within segments of a packed sequence, over the table of hopper_tiles.py, on compute
// capability 9.0. hopper.py compiles it at run time behind the other files of its name and the
// products that it writes itself, and defines ELEMENT, TYPE, SIZE, GROUPS, KEYS, STAGES and SCALE.
//
// A block stays on its processor and takes item after item. One thread copies queries, and keys and
// values into a ring of stages; three warp groups compute 64 queries each: while one goes through
// the softmax, the products of the others run. Three, because each block of keys crosses the L2
// cache once for all of them: 64 queries a block of keys would ask more than the cache can give.
//
// A tile in shared memory is rows of 128 bytes, swizzled: the first 64 columns of a head, and
// behind them, in a second lot of such rows, the other 8 or 16 and padding that is never copied.

constexpr int SLICES = (CHUNKS + 1) / 2;
constexpr bool WIDE = SIZE > 64;
constexpr int LOT = KEYS * 128;
constexpr int KEY_BYTES = WIDE ? 2 * LOT : LOT;
constexpr int STAGE_BYTES = KEY_BYTES + 2 * LOT;
constexpr int BLOCK_BYTES = KEYS * SIZE * 2;  // copied
constexpr int QUERY_LOT = 64 * 128;
constexpr int QUERY_BYTES = WIDE ? 2 * QUERY_LOT : QUERY_LOT;
constexpr int WARPS = 4 * GROUPS;
constexpr int COPYING_REGISTERS = 32;
constexpr int COMPUTING_REGISTERS = 160;
struct Maps {
    TensorMap block, block_rest, queries, queries_rest;
};

struct Ring {
    u32 tiles, queries, full_k, full_v, empty_k, empty_v, full_q, empty_q;
    DEVICE Ring(u32 memory, u32 barriers)
        : tiles(memory),
          queries(memory + STAGES * STAGE_BYTES),
          full_k(barriers),
          full_v(full_k + 8 * STAGES),
          empty_k(full_v + 8 * STAGES),
          empty_v(empty_k + 8 * STAGES),
          full_q(empty_v + 8 * STAGES),
          empty_q(full_q + 8) {}
    DEVICE u32 k(Place place) const { return uniform(tiles + place.stage * STAGE_BYTES); }
    DEVICE u32 v(Place place) const { return k(place) + KEY_BYTES; }
    DEVICE void wait_k(Place place) const { barrier_wait(full_k + 8 * place.stage, place.parity); }
    DEVICE void wait_v(Place place) const { barrier_wait(full_v + 8 * place.stage, place.parity); }
    DEVICE void free(u32 barrier) const {
        if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
    }
    DEVICE void free_k(Place place) const { free(empty_k + 8 * place.stage); }
    DEVICE void free_v(Place place) const { free(empty_v + 8 * place.stage); }
    DEVICE void initialise() const {
        barrier_init(full_q, 1);
        barrier_init(empty_q, WARPS);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full_k + 8 * i, 1);
            barrier_init(full_v + 8 * i, 1);
            barrier_init(empty_k + 8 * i, WARPS);
            barrier_init(empty_v + 8 * i, WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
};

// Where 8 columns of a row lie in a tile whose lots are of so many bytes.
DEVICE u32 chunk_at(int row, int chunk, int lot) {
    return chunk / 8 * lot + row * 128 + (chunk ^ row) % 8 * 16;
}

DEVICE void copy(u32 to, const TensorMap& map, const TensorMap& rest, int lot, int column, int row,
                 u32 barrier) {
    tensor_copy(to, map, column, row, barrier);
    if (WIDE) tensor_copy(to + lot, rest, column + 64, row, barrier);
}

DEVICE void copy_all(const Maps& maps, const int4* table, const Plan& plan, const Ring& ring) {
    Place place;
    u32 parity = 1;
    for (int item = blockIdx.x; item < plan.items; item += gridDim.x) {
        Work work(table, plan, item);
        if (work.empty()) continue;
        int groups = work.strip ? 1 : min(GROUPS, (work.end - work.row + 63) / 64);
        barrier_wait(ring.empty_q, parity);
        parity ^= 1;
        barrier_expect(ring.full_q, groups * 64 * SIZE * 2);
        for (int i = 0; i < groups; i++)
            copy(ring.queries + i * QUERY_BYTES, maps.queries, maps.queries_rest, QUERY_LOT,
                 work.head * SIZE, work.row + 64 * i, ring.full_q);
        // Blocks of one head begin at different keys, so as not to crowd the same lines of the L2.
        int whole = work.blocks() - 1, at = item % max(whole, 1), row = work.start + whole * KEYS;
        int k = (plan.heads + work.head) * SIZE, v = k + plan.heads * SIZE;
        for (int block = whole; block >= 0; block--) {
            u32 to = ring.tiles + place.stage * STAGE_BYTES, full = ring.full_k + 8 * place.stage;
            barrier_wait(ring.empty_k + 8 * place.stage, place.parity ^ 1);
            barrier_expect(full, BLOCK_BYTES);
            copy(to, maps.block, maps.block_rest, LOT, k, row, full);
            full = ring.full_v + 8 * place.stage;
            barrier_wait(ring.empty_v + 8 * place.stage, place.parity ^ 1);
            barrier_expect(full, BLOCK_BYTES);
            copy(to + KEY_BYTES, maps.block, maps.block_rest, LOT, v, row, full);
            place.next();
            at = at + 1 < whole ? at + 1 : 0;
            row = work.start + at * KEYS;
        }
    }
}

DEVICE void scores_begin(float (&s)[KEYS / 2], const u32 (&q)[SLICES * 4], u32 k) {
    u64 keys = descriptor(k, 16);
#pragma unroll
    for (int i = 0; i < SLICES; i++)
        multiply_qk(s, q[4 * i], q[4 * i + 1], q[4 * i + 2], q[4 * i + 3],
                    keys + (i / 4 * LOT + i % 4 * 32) / 16, i > 0);
    products_commit();
}

DEVICE void sums_begin(float (&o)[COLUMNS / 2], const u32 (&p)[KEYS / 4], u32 v) {
    u64 values = descriptor(v, LOT);
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++)
        multiply_pv(o, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3], values + i * 128, 1);
    products_commit();
}

// Values of keys beyond the segment become zero: their weights are, but what lies there may be NaN.
DEVICE void clear_values(u32 v, int from, int group, int thread) {
    for (int i = from * CHUNKS + thread; i < KEYS * CHUNKS; i += 128)
        store16(v + chunk_at(i / CHUNKS, i % CHUNKS, LOT), 0, 0);
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
DEVICE void load_queries(u32 (&q)[SLICES * 4], u32 from, int thread) {
    int row = thread / 32 * 16 + thread % 16;
#pragma unroll
    for (int i = 0; i < SLICES; i++)
        load_matrices(q + 4 * i, from + chunk_at(row, 2 * i + thread % 32 / 16, QUERY_LOT));
    if (CHUNKS % 2) q[4 * SLICES - 2] = q[4 * SLICES - 1] = 0;
}

DEVICE void skip(const Ring& ring, Place& place, int blocks) {
#pragma unroll 1
    for (; blocks > 0; blocks--) {
        ring.wait_k(place);
        ring.free_k(place);
        ring.wait_v(place);
        ring.free_v(place);
        place.next();
    }
}

// Sums of every stride-th of the item's blocks, from `first` on.
DEVICE void compute(const Ring& ring, Place& place, const Work& work, const u32 (&q)[SLICES * 4],
                    float (&o)[COLUMNS / 2], Softmax& softmax, int first, int stride, int thread) {
    float s[KEYS / 2];
    u32 p[KEYS / 4];
    int blocks = work.blocks(), block = first + stride;
    ring.wait_k(place);
    products_begin();
    scores_begin(s, q, ring.k(place));
    bool partial = first == 0 && work.last_keys() < KEYS;
    if (partial) {
        ring.wait_v(place);
        clear_values(ring.v(place), work.last_keys(), threadIdx.x / 128 - 1, thread);
    }
    products_wait<0>();
    pin(s);
    ring.free_k(place);
    // Not right behind their loads: an arrival does not wait for these, and the next queries may be
    // copied over them. The first product has read them all from registers.
    ring.free(ring.empty_q);
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
        scores_begin(s, q, ring.k(place));
        sums_begin(o, p, ring.v(here));
        products_wait<1>();
        pin(s);
        ring.free_k(place);
        softmax.step(s);
        pin(s);
        // This wait stands here, and not before the products that need it, because the compiler
        // moves the next one upwards, before the softmax, unless a branch lies between.
        ring.wait_v(place);
        products_wait<0>();
        pin(o);
        ring.free_v(here);
        softmax.rescale(o);
        pack(p, s);
    }
    products_begin();
    sums_begin(o, p, ring.v(place));
    products_wait<0>();
    pin(o);
    ring.free_v(place);
    place.next();
    skip(ring, place, blocks - 1 - (block - stride));
}

DEVICE void compute_all(ELEMENT* qkv, const int4* table, const Plan& plan, const Ring& ring,
                        int group, int thread) {
    float o[COLUMNS / 2];
    u32 q[SLICES * 4], parity = 0;
    Place place;
    for (int item = blockIdx.x; item < plan.items; item += gridDim.x) {
        Work work(table, plan, item);
        if (work.empty()) continue;
        barrier_wait(ring.full_q, parity);
        parity ^= 1;
        load_queries(q, ring.queries + (work.strip ? 0 : group * QUERY_BYTES), thread);
        int blocks = work.blocks(), first = work.strip ? group : 0;
        if (!work.strip) work.row += 64 * group;
        if (work.empty() || first > blocks) first = blocks;
        Softmax softmax;
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++) o[i] = 0;
        skip(ring, place, first);
        if (first < blocks)
            compute(ring, place, work, q, o, softmax, first, work.strip ? GROUPS : 1, thread);
        else
            ring.free(ring.empty_q);
        // Of strips only the first group's queries are in use, and no tile follows them.
        if (work.strip) merge(ring.queries + QUERY_BYTES, o, softmax, group, thread);
        if (!work.strip || group == 0) store(qkv, plan.heads, work, o, thread);
    }
}

extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), 1)
    attend(ELEMENT* qkv, const int4* table, const __grid_constant__ Maps maps, int heads) {
    extern __shared__ unsigned char memory[];
    __shared__ u64 barriers[4 * STAGES + 2];
    // The swizzle follows from addresses: whole 1024 bytes.
    Ring ring((shared_address(memory) + 1023) & ~1023u, shared_address(barriers));
    if (threadIdx.x == 0) ring.initialise();
    for (int i = threadIdx.x; i < STAGES * KEYS; i += 128 * (GROUPS + 1)) {
        u32 to = ring.tiles + i / KEYS * STAGE_BYTES + chunk_at(i % KEYS, CHUNKS, LOT);
        store16(to + KEY_BYTES, pair(1, 0), 0);
        // The queries are zero in the second half of an odd last slice, the keys must be finite.
        if (CHUNKS % 2) store16(to, 0, 0);
    }
    publish();
    __syncthreads();
    Plan plan(table, heads);
    int group = uniform(threadIdx.x / 128), thread = threadIdx.x % 128;
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COPYING_REGISTERS));
        if (thread == 0) copy_all(maps, table, plan, ring);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COMPUTING_REGISTERS));
        compute_all(qkv, table, plan, ring, group - 1, thread);
    }
}
