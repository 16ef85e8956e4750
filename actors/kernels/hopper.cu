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

constexpr int SLICES = (CHUNKS + 1) / 2;  // of 16 columns, that one product multiplies
constexpr int COPYING_REGISTERS = 32;
constexpr int COMPUTING_REGISTERS = 160;

// The descriptor of values so many bytes further, for which the same ones follow.
DEVICE u64 further(u64 values, int bytes) {
    return values + (u64)(bytes / 16) - (REST ? 0 : (u64)(bytes / 16) << 16);
}

DEVICE void scores_begin(float (&s)[KEYS / 2], const u32 (&q)[SLICES * 4], const Ring& ring,
                         Place place) {
    u64 keys = ring.keys + place.stage * (STAGE_BYTES / 16);
    u64 rest = ring.keys_last + place.stage * (KEY_REST / 16);
#pragma unroll
    for (int i = 0; i < SLICES; i++)
        multiply_qk(s, q[4 * i], q[4 * i + 1], q[4 * i + 2], q[4 * i + 3], i < 4 ? keys + i * 2 : rest,
                    i > 0);
    products_commit();
}

DEVICE void sums_begin(float (&o)[COLUMNS / 2], const u32 (&p)[KEYS / 4], const Ring& ring,
                       Place place) {
    u64 values = further(ring.values, place.stage * STAGE_BYTES);
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++)
        multiply_pv(o, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3], further(values, i * 16 * 128), 1);
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
        load_matrices(q + 16, ring.q_rest(group) + rest_at(row, second));
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
            // Shared strips meet in the queries' place. Freed only now, when what was computed of it
            // shows that all loads from there have ended: an arrival does not wait for them, and
            // right behind them the next queries were seen to be copied over these.
            if (work.shared) merge(ring.scratch, o, softmax, group, thread);
            if (!work.shared || group == 0)
                store(qkv, plan.heads, work, work.row + 64 * strip, o, thread);
            if (thread % 32 == 0) barrier_arrive(ring.empty_q + 8 * group);
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
