// Attention within the segments of a packed sequence, for compute capability 9.0, over the table of
// attention.py. That file defines ELEMENT, TYPE, SIZE, GROUPS, KEYS, STAGES, CLUSTER, SHARES, SCALE,
// PAD, SIDE and HEADROOM, and compiles this one after ptx.cu, the wgmma functions that it generates,
// attention_items.cu and attention_loads.cu.
//
// Persistent kernel: each block (CTA) loops over work items. One producer warp loads K and V tiles
// into a circular shared-memory buffer with TMA; one warp per consumer warpgroup loads its Q tile.
// Three consumer warpgroups process 64 query rows each, so that the softmax of one overlaps with
// the GEMMs of the others; they issue their GEMMs in turn, because otherwise all compute GEMMs at
// the same time and then softmax at the same time. It takes three because a K and V tile is read
// from L2 once for all of them: with 64 query rows per tile the L2 cache could not keep up. If all
// keys of a segment fit into the buffer, they stay there until every query of the item has used
// them, and the warpgroups do not wait for each other.
//
// Instructions other than wgmma take register bandwidth from the tensor cores, about a cycle each
// (BENCHMARKS.md). So the softmax does not compute the maximum of every block (see Softmax) and, if
// REFERRED, does not scale or subtract.
//
// A thread holds columns 2 (lane % 4) + {0, 1} of every 8, in rows lane / 4 and lane / 4 + 8 of its
// warp. The last columns of the accumulators are the sums of the softmax weights.

constexpr int SLICES = (CHUNKS + 1) / 2;  // of 16 columns: the depth of one wgmma
constexpr int PRODUCER_REGISTERS = 32;
constexpr int CONSUMER_REGISTERS = 160;
constexpr int LINES = SIDE ? KEYS / SIDE : 1;
// What Terms relies on. With so many blocks, Work::at is within the view also a stride too far.
static_assert(!SIDE || (SIZE == 64 && SIDE % 8 == 0 && KEYS == LINES * SIDE && LINES <= 2 &&
                        SIDE * SIDE % KEYS == 0 && SIDE * SIDE / KEYS > 2 * GROUPS));
constexpr bool REFERRED = PAD || SIDE;  // GEMMs yield t - off; see Softmax
constexpr float FACTOR = REFERRED ? 1 : SCALE;
constexpr int COLUMNS = SIZE + 8;  // of the accumulators: the values end with a column of ones
// High words of descriptors: for swizzled rows of 128 bytes; for swizzled rows of 32 bytes, or rows
// of 16 bytes.
constexpr u32 TILE_WORD = 0x40000040, REST_WORD = REST > 1 ? 0xc0000010 : 8;

// Online softmax. Weights of row r are 2 ** (t - off[r]), where t is a score times SCALE. `off` is
// HEADROOM above the largest score of the first block, and is raised only when a weight becomes 2
// or more. Then the weights of the block are recomputed from its scores. This is rare, and all
// other blocks need no maximum, no exchange between threads and no rescaling. `off` is a whole
// number, so that raising it causes no rounding.
//
// If REFERRED, the GEMM yields t - off, and queries are scaled when they are loaded. If PAD, columns
// that pad them hold -off, which is multiplied by ones in the keys; if SIDE, the GEMM starts with
// -off.
struct Softmax {
    float off[2], decay[2];
    bool raised;

    // The largest t of each row, or t - off.
    DEVICE static void highest(const float (&s)[KEYS / 2], float (&high)[2]) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float even = s[2 * r], odd = s[2 * r + 1];
#pragma unroll
            for (int i = 2 * r + 4; i < KEYS / 2; i += 4) {
                even = fmaxf(even, s[i]);
                odd = fmaxf(odd, s[i + 1]);
            }
            high[r] = fmaxf(even, odd);
            high[r] = fmaxf(high[r], __shfl_xor_sync(~0u, high[r], 1));
            high[r] = fmaxf(high[r], __shfl_xor_sync(~0u, high[r], 2));
            high[r] *= FACTOR;
        }
    }

    // Scores to weights. `less`: what is still to be subtracted.
    DEVICE static void weigh(const float (&s)[KEYS / 2], u32 (&p)[KEYS / 4],
                             const float (&less)[2]) {
#pragma unroll
        for (int i = 0; i < KEYS / 4; i++) {
            p[i] = pair(exp2_fast(s[2 * i] * FACTOR - less[i % 2]),
                        exp2_fast(s[2 * i + 1] * FACTOR - less[i % 2]));
        }
    }

    DEVICE void first(const float (&s)[KEYS / 2], u32 (&p)[KEYS / 4]) {
        highest(s, off);
#pragma unroll
        for (int r = 0; r < 2; r++) off[r] = ceilf(off[r]) + HEADROOM;
        weigh(s, p, off);
    }

    DEVICE void step(const float (&s)[KEYS / 2], u32 (&p)[KEYS / 4]) {
        float less[2] = {REFERRED ? 0 : off[0], REFERRED ? 0 : off[1]};
        weigh(s, p, less);
        // In a weight of 2 or more, or a NaN, the highest bit of the exponent is set.
        u32 bits = 0;
#pragma unroll
        for (int i = 0; i < KEYS / 4; i++) bits |= p[i];
        raised = __any_sync(~0u, bits & 0x40004000);
        if (raised) {
            float high[2];
            highest(s, high);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                // Per row, so that no row depends on the others of its warp.
                float above = high[r] - less[r], by = above >= 1 ? ceilf(above) + HEADROOM : 0;
                decay[r] = exp2_fast(-by);
                off[r] += by;
                less[r] += by;
            }
            weigh(s, p, less);
        }
    }

    DEVICE void rescale(float (&o)[COLUMNS / 2]) const {
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++) o[i] *= decay[i / 2 % 2];
    }
};

// What relative positions add to the scores, for segments that are views of SIDE x SIDE patches. A
// block of keys holds LINES rows of the view. A query's terms for the columns of the view are the
// same in every block, so they stay in registers. The GEMM adds its scores to them, to the term for
// the row of the view, and to -off. `terms` [patch, head, 2, SIDE], in units of t: for the rows,
// then for the columns. Without SIDE there are no terms.
struct Terms {
#if SIDE
    float columns[SIDE / 2];  // in the order of the accumulators
    u32 lines[2];             // of the next block
    const ELEMENT* at[2];

    DEVICE Terms(const ELEMENT* terms, int heads, const Work& work, int first, int thread) {
        int lane = thread % 32;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int row = first + thread / 32 * 16 + lane / 4 + 8 * r;
            at[r] = terms + ((long long)min(row, work.end - 1) * heads + work.head) * 2 * SIDE;
#pragma unroll
            for (int c = 0; c < SIDE / 8; c++) {
                u32 both = load4((const u32*)(at[r] + SIDE + c * 8 + lane % 4 * 2));
                columns[4 * c + 2 * r] = low(both);
                columns[4 * c + 2 * r + 1] = high(both);
            }
        }
    }
    // Starts to load the terms for the rows in a block of keys, a block before they are needed.
    DEVICE void fetch(int block) {
#pragma unroll
        for (int r = 0; r < 2; r++)
            lines[r] = LINES == 1 ? load2(at[r] + block) : load4((const u32*)at[r] + block);
    }
    DEVICE void start(float (&s)[KEYS / 2], const float (&off)[2]) const {
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++) {
            int line = i / (SIDE / 2), r = i / 2 % 2;
            s[i] = columns[i % (SIDE / 2)] + (low(lines[r] >> 16 * line) - off[r]);
        }
        pin(s);
    }
#else
    DEVICE Terms(const ELEMENT*, int, const Work&, int, int) {}
    DEVICE void fetch(int) {}
    DEVICE void start(float (&)[KEYS / 2], const float (&)[2]) const {}
#endif
};

// Adds up the warpgroups' accumulators of a shared strip in the first warpgroup, relative to a
// common `off`. Afterwards TMA may write to `scratch`.
DEVICE void merge(u32 scratch, float (&o)[COLUMNS / 2], Softmax& softmax, int group, int thread) {
    constexpr int TOP = COLUMNS / 2;
    float* at = (float*)__cvta_shared_to_generic(scratch) + thread;
    meet<128 * GROUPS>(1 + GROUPS);
#pragma unroll 1
    for (int other = 1; other < GROUPS; other++) {
        if (group == other) {
#pragma unroll
            for (int i = 0; i < TOP; i++) at[i * 128] = o[i];
            at[TOP * 128] = softmax.off[0];
            at[TOP * 128 + 128] = softmax.off[1];
        }
        meet<128 * GROUPS>(1 + GROUPS);
        if (group == 0) {
            float ours[2], theirs[2];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float off = at[TOP * 128 + 128 * r], most = fmaxf(off, softmax.off[r]);
                ours[r] = exp2_fast(softmax.off[r] - most);
                theirs[r] = exp2_fast(off - most);
                softmax.off[r] = most;
            }
#pragma unroll
            for (int i = 0; i < TOP; i++)
                o[i] = o[i] * ours[i / 2 % 2] + at[i * 128] * theirs[i / 2 % 2];
        }
        publish();
        meet<128 * GROUPS>(1 + GROUPS);
    }
}

DEVICE void store(ELEMENT* qkv, int heads, const Work& work, int first,
                  const float (&o)[COLUMNS / 2], int thread) {
    int lane = thread % 32;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = first + thread / 32 * 16 + lane / 4 + 8 * r;
        float share = 1 / __shfl_sync(~0u, o[COLUMNS / 2 - 4 + 2 * r], lane & 28);
        ELEMENT* to = qkv + ((long long)row * 3 * heads + work.head) * SIZE + lane % 4 * 2;
        if (row < work.end)
#pragma unroll
            for (int c = 0; c < CHUNKS; c++)
                *(u32*)(to + c * 8) = pair(o[4 * c + 2 * r] * share, o[4 * c + 2 * r + 1] * share);
    }
}

DEVICE void scores_begin(float (&s)[KEYS / 2], const u32 (&q)[SLICES * 4], const Ring& ring,
                         Place place) {
    u32 keys = ring.keys + place.stage * (STAGE_BYTES / 16);
    u32 further = place.stage * (KEY_REST / 16), rest = ring.keys_last + further;
    if (PAD) rest -= further << 16;  // all stages share the ones that pad keys
#pragma unroll
    for (int i = 0; i < 4; i++)
        multiply_qk<TILE_WORD>(s, q[4 * i], q[4 * i + 1], q[4 * i + 2], q[4 * i + 3], keys + i * 2,
                               SIDE || i > 0);
    if constexpr (SLICES > 4) multiply_qk<REST_WORD>(s, q[16], q[17], q[18], q[19], rest, 1);
    wgmma_commit();
}

DEVICE void sums_begin(float (&o)[COLUMNS / 2], const u32 (&p)[KEYS / 4], const Ring& ring,
                       Place place) {
    constexpr u32 STEP = REST ? 1 : 1u - (1u << 16);  // all values share one column of ones
    u32 values = ring.values + place.stage * (STAGE_BYTES / 16) * STEP;
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++)
        multiply_pv<TILE_WORD>(o, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3],
                               values + i * 128 * STEP, 1);
    wgmma_commit();
}

// Zeroes the values of keys beyond the segment: their weights are zero, but 0 x NaN would be NaN.
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

// Two of the four matrices hold the first chunk of a slice: rows 0 to 7 and 8 to 15 of the warp.
DEVICE void load_queries(u32 (&q)[SLICES * 4], const Ring& ring, int group, int thread) {
    int row = thread / 32 * 16 + thread % 16, second = thread % 32 / 16;
#pragma unroll
    for (int i = 0; i < 4; i++)
        load_matrices(q + 4 * i, ring.q(group) + chunk_at(row, 2 * i + second));
    if constexpr (REST > 0)
        load_matrices(q + 16, ring.q_rest(group) + rest_at(row, second));
    if constexpr (REST == 1) q[4 * SLICES - 2] = q[4 * SLICES - 1] = 0;
    if constexpr (REFERRED)
#pragma unroll
        for (int i = 0; i < SIZE / 4; i++) q[i] = pair(low(q[i]) * SCALE, high(q[i]) * SCALE);
}

// Writes -off into the first columns that pad queries. Three numbers with 8 bits of precision hold
// a whole number of 24 bits.
DEVICE void refer(u32 (&q)[SLICES * 4], const Softmax& softmax, int thread) {
    if constexpr (PAD)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float off = -softmax.off[r];
            u32 first = pair(off, 0);
            off -= low(first);
            u32 second = pair(off, 0);
            off -= low(second);
            u32 both = first | second << 16, third = pair(off, 0);
            q[18 + r] = thread % 4 == 0 ? both : thread % 4 == 1 ? third : 0;
        }
}

DEVICE void skip(const Ring& ring, Place& place, int blocks) {
#pragma unroll 1
    for (; blocks > 0; blocks--) {
        ring.wait_k(place);
        ring.wait_v(place);
        if (threadIdx.x % 32 < CLUSTER) {
            ring.free_k(place);
            ring.free_v(place);
        }
        place.next();
    }
}

// Named barriers with which the warpgroups issue their GEMMs in turn: each waits at its own for the
// previous one.
DEVICE void my_turn(int group) {
    meet<256>(8 + group);
}

DEVICE void next_turn(int group) {
    asm volatile("bar.arrive %0, 256;" ::"r"(8 + (group + 1) % GROUPS) : "memory");
}

// Accumulates every stride-th block of the item's keys, from `first` on. `last`: no later strip of
// this warpgroup reads these blocks again, so their stages can be freed. `ordered`: all warpgroups
// compute the same number of blocks in this round, and issue their GEMMs in turn; never for views,
// which are faster without.
DEVICE void compute(const Ring& ring, Place& place, const Work& work, u32 (&q)[SLICES * 4],
                    float (&o)[COLUMNS / 2], Softmax& softmax, Terms& terms, int first, int stride,
                    bool last, int thread, int group, bool ordered) {
    float s[KEYS / 2];
    u32 p[KEYS / 4];
    int blocks = work.blocks(), block = first + stride;
    bool frees = last && thread % 32 < CLUSTER;
    if (ordered && group == GROUPS - 1 && block < blocks) next_turn(group);
    terms.fetch(work.at(first));
    terms.start(s, {0, 0});
    terms.fetch(work.at(block));
    ring.wait_k(place);
    wgmma_begin();
    scores_begin(s, q, ring, place);
    bool partial = first == 0 && work.last_keys() < KEYS;
    if (partial) {
        ring.wait_v(place);
        clear_values(ring.v(place), work.last_keys(), threadIdx.x / 128 - 1, thread);
    }
    wgmma_wait<0>();
    pin(s);
    if (frees) ring.free_k(place);
    if (partial) mask(s, work.last_keys(), thread);
    softmax.first(s, p);
    refer(q, softmax, thread);
    ring.wait_v(place);
    for (; block < blocks; block += stride) {
        Place here = place;
        place.next();
        skip(ring, place, stride - 1);
        terms.start(s, softmax.off);
        terms.fetch(work.at(block + stride));
        ring.wait_k(place);
        if (ordered) my_turn(group);
        wgmma_begin();
        sums_begin(o, p, ring, here);
        scores_begin(s, q, ring, place);
        if (ordered && (group < GROUPS - 1 || block + stride < blocks)) next_turn(group);
        wgmma_wait<0>();
        pin(s);
        pin(o);
        hold(p);
        if (frees) {
            ring.free_k(place);
            ring.free_v(here);
        }
        softmax.step(s, p);
        hold(p);
        if (softmax.raised) {
            softmax.rescale(o);
            refer(q, softmax, thread);
        }
        ring.wait_v(place);
    }
    wgmma_begin();
    sums_begin(o, p, ring, place);
    wgmma_wait<0>();
    pin(o);
    hold(p);
    if (frees) ring.free_v(place);
    place.next();
    skip(ring, place, blocks - 1 - (block - stride));
}

DEVICE void compute_all(ELEMENT* qkv, const int4* table, const ELEMENT* terms_of_all,
                        const Plan& plan, const Ring& ring, int group, int thread) {
    float o[COLUMNS / 2];
    u32 q[SLICES * 4], parity = 0;
    int turn = 0;
    Place place;
    int4 entry = plan.entry(table, plan.begin);
    for (int item = plan.begin; item < plan.end; item += plan.crews) {
        Work work(plan, item, entry);
        // Loaded an item ahead, to hide the latency.
        entry = plan.entry(table, item + plan.crews);
        if (work.strips == 0) continue;
        Place begin = place;
        int blocks = work.blocks();
        for (int round = 0; round < work.strips; round += TOGETHER) {
            int strip = round + work.first(ring.rank, group, turn);
            if (strip >= work.strips) {
                if (!work.kept() || round == 0) skip(ring, place, blocks);
                continue;
            }
            if (work.kept()) place = begin;
            barrier_wait(ring.full_q + 8 * group, parity);
            parity ^= 1;
            load_queries(q, ring, group, thread);
            Terms terms(terms_of_all, plan.heads, work, work.row + 64 * strip, thread);
            Softmax softmax;
            softmax.off[0] = softmax.off[1] = -INFINITY;
#pragma unroll
            for (int i = 0; i < COLUMNS / 2; i++) o[i] = 0;
            int first = work.shared ? min(group, blocks) : 0;
            bool ordered =
                !SIDE && !work.shared && !work.kept() && work.strips - round >= TOGETHER;
            skip(ring, place, first);
            if (first < blocks)
                compute(ring, place, work, q, o, softmax, terms, first, work.shared ? GROUPS : 1,
                        !work.kept() || strip + TOGETHER >= work.strips, thread, group, ordered);
            // Shared strips are merged in the memory of the queries. That memory is freed only
            // here, where the results depend on all loads from it, because an arrival on a barrier
            // does not wait for loads. When it was freed right after the loads, the next queries
            // overwrote queries that were still being loaded.
            if (work.shared) merge(ring.scratch, o, softmax, group, thread);
            if (!work.shared || group == 0)
                store(qkv, plan.heads, work, work.row + 64 * strip, o, thread);
            if (thread % 32 == 0) barrier_arrive(ring.empty_q + 8 * group);
        }
        turn = work.next(turn);
    }
}

extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), 1)
#if CLUSTER > 1
    __cluster_dims__(CLUSTER)
#endif
    attend(ELEMENT* qkv, const int4* table, const __grid_constant__ Maps maps, int heads,
           int launch, int launches, const ELEMENT* terms) {
    extern __shared__ unsigned char memory[];
    __shared__ u64 barriers[4 * STAGES + 2 * GROUPS];
    // The swizzle depends on the address, so the buffer starts at a multiple of 1024 bytes.
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
    if (PAD)
        for (int i = threadIdx.x; i < KEYS; i += 128 * (GROUPS + 1))
            store16(ring.units + i * 16, pair(1, 1), pair(1, 0));
    publish();
    Plan plan(table, heads, launch, launches);
    if (CLUSTER > 1) cluster_publish();
    else __syncthreads();
    depend_wait();
    int group = uniform(threadIdx.x / 128), thread = threadIdx.x % 128;
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        int warp = uniform(thread / 32);
        if (thread == 0) copy_blocks(maps, table, plan, ring);
        else if (thread % 32 == 0) copy_queries(maps, table, plan, ring, warp - 1);
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        compute_all(qkv, table, terms, plan, ring, group - 1, thread);
    }
    if (CLUSTER > 1) cluster_leave();
}
