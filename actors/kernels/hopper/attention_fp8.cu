// Attention in FP8 (e4m3) within long segments, for compute capability 9.0, over the table of
// attention.py, in slots. attention_fp8.py explains slots, defines SIZE, GROUPS, KEYS, STAGES,
// CLUSTER, FLUSH and HEADROOM, and compiles this file after ptx.cu, the wgmma functions that it
// generates, and attention_items.cu.
//
// A score of 1 is 63 codes of e4m3, and eight codes make an octave. So the code of a weight is 63
// times the score, rounded: 2 ** x becomes a straight line between two powers of two, which is at
// most 3 % off, while e4m3 rounds by up to 6 %. This needs no exponential, and fewer instructions
// than one would. The GEMM subtracts the reference of a row, too: its digits are in columns that
// pad queries.
//
// The tensor cores keep only some 13 bits of a sum in FP8. So after every FLUSH blocks of keys,
// their sums are added up in float32.

constexpr int COLUMNS = SIZE + 8;  // of the accumulators: the values end with a column of ones
constexpr int REST = SIZE > 64;
constexpr int PITCH = REST ? 80 : 64;  // bytes of a head of queries or keys
constexpr int V_BYTES = COLUMNS * KEYS, K_BYTES = KEYS * 64, REST_BYTES = REST * KEYS * 16;
constexpr int STAGE_BYTES = V_BYTES + K_BYTES + REST_BYTES;
constexpr int WARPS = 4 * GROUPS, THREADS = 128 * (GROUPS + 1);
// The high words of the descriptors: for keys in swizzled rows of 64 bytes, and for values in rows
// of KEYS = 128.
constexpr u32 K_WORD = 0x80000020, V_WORD = 0x40000040, REST_WORD = 8;
constexpr float UNIT = 0.126953125f;  // the score of an octave: 8 / 63, as 1/8 + 1/512
constexpr float TOP = 2 - HEADROOM * UNIT;

struct Maps {
    TensorMap keys, keys_rest, values;
};

struct Ring {
    u32 tiles, units;
    u32 full_k, full_v, empty_k, empty_v, freed;
    u32 keys, keys_last, values;  // low words of the descriptors of the first stage
    int rank;
    DEVICE Ring(u32 memory, u32 barriers)
        : tiles(memory),
          units(memory + STAGES * STAGE_BYTES),
          full_k(barriers),
          full_v(full_k + 8 * STAGES),
          empty_k(full_v + 8 * STAGES),
          empty_v(empty_k + 8 * STAGES),
          freed(cluster_address(empty_k, threadIdx.x % CLUSTER)),
          keys(low_word(uniform(tiles + V_BYTES), 0)),
          keys_last(REST ? low_word(uniform(tiles + V_BYTES + K_BYTES),
                                    uniform(units - tiles - V_BYTES - K_BYTES))
                         : low_word(uniform(units), 0)),
          values(low_word(uniform(tiles), 0)),
          rank(cluster_rank()) {}
    DEVICE u32 v(Place place) const { return tiles + place.stage * STAGE_BYTES; }
    DEVICE void wait_k(Place place) const { barrier_wait(full_k + 8 * place.stage, place.parity); }
    DEVICE void wait_v(Place place) const { barrier_wait(full_v + 8 * place.stage, place.parity); }
    DEVICE void free_k(Place place) const { barrier_arrive_at(freed + 8 * place.stage); }
    DEVICE void free_v(Place place) const {
        barrier_arrive_at(freed + 8 * STAGES + 8 * place.stage);
    }
    DEVICE void initialise() const {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full_k + 8 * i, 1);
            barrier_init(full_v + 8 * i, 1);
            barrier_init(empty_k + 8 * i, WARPS * CLUSTER);
            barrier_init(empty_v + 8 * i, WARPS * CLUSTER);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
};

// Keys are loaded in another order: row 8b + 2a + c of 16 is key 4a + 2b + c. In that order, a
// thread's scores of 16 keys are the four neighbours that the GEMM with the values expects of it.
DEVICE void copy_keys(u32 to, const TensorMap& map, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%2, %3, %6, %6, %6}], [%4], %5;" ::"r"(to), "l"(&map),
        "r"(column), "r"(row), "r"(barrier), "h"((unsigned short)((1 << CLUSTER) - 1)), "r"(0)
        : "memory");
}

// The first block of a cluster copies keys to all blocks, the last one values.
DEVICE void copy_block(const Maps& maps, const Ring& ring, Place place, int head, int heads,
                       int row) {
    u32 to = ring.tiles + place.stage * STAGE_BYTES;
    u32 full = ring.full_k + 8 * place.stage;
    int column = (heads + head) * PITCH;
    barrier_wait(ring.empty_k + 8 * place.stage, place.parity ^ 1);
    barrier_expect(full, K_BYTES + REST_BYTES);
    if (ring.rank == 0) {
        copy_keys(to + V_BYTES, maps.keys, column, row, full);
        if (REST) copy_keys(to + V_BYTES + K_BYTES, maps.keys_rest, column + 64, row, full);
    }
    full = ring.full_v + 8 * place.stage;
    barrier_wait(ring.empty_v + 8 * place.stage, place.parity ^ 1);
    barrier_expect(full, SIZE * KEYS);
    if (ring.rank == CLUSTER - 1)
        tensor_copy_to_all(to, maps.values, row, head * SIZE, full, CLUSTER);
}

DEVICE void copy_blocks(const Maps& maps, const int4* table, const Plan& plan, const Ring& ring) {
    Place place;
    int4 entry = plan.entry(table, plan.begin);
    for (int item = plan.begin; item < plan.end; item += plan.crews) {
        Work work(plan, item, entry);
        entry = plan.entry(table, item + plan.crews);
        if (work.strips == 0) continue;
        for (int i = 0; i < work.strips; i += TOGETHER)
#pragma unroll 1
            for (int index = 0; index < work.blocks(); index++) {
                int row = work.start + work.at(index) * KEYS;
                copy_block(maps, ring, place, work.head, plan.heads, row);
                place.next();
            }
    }
}

DEVICE u32 weights4(float a, float b, float c, float d, u32& bits) {
    u32 first, second, all;
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(first) : "f"(b), "f"(a));
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(second) : "f"(d), "f"(c));
    asm("lop3.b32 %0, %0, %1, %2, 0xfe;" : "+r"(bits) : "r"(first), "r"(second));
    // x * 63 + 1024: the low byte is the code.
    asm("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(first) : "r"(0x53e053e0), "r"(0x64006400));
    asm("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(second) : "r"(0x53e053e0), "r"(0x64006400));
    asm("prmt.b32 %0, %1, %2, 0x6420;" : "=r"(all) : "r"(first), "r"(second));
    return all;
}

DEVICE u32 code(float x) {
    unsigned short both;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(0.0f), "f"(x));
    return both;
}

DEVICE float decoded(u32 code) {
    u32 both;
    float value;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(both) : "h"((unsigned short)code));
    asm("{\n.reg .b16 first, second;\nmov.b32 {first, second}, %1;\ncvt.f32.f16 %0, first;\n}"
        : "=f"(value) : "r"(both));
    return value;
}

struct Softmax {
    float off[2], decay[2];  // off in octaves
    bool raised;

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
        }
    }

    DEVICE static u32 weigh(const float (&s)[KEYS / 2], u32 (&p)[KEYS / 8]) {
        u32 bits = 0;
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++) {
            const float* at = s + i / 2 * 8 + i % 2 * 2;
            p[i] = weights4(at[0], at[1], at[4], at[5], bits);
        }
        return bits;
    }

    DEVICE static void weigh_less(const float (&s)[KEYS / 2], u32 (&p)[KEYS / 8],
                                  const float (&less)[2]) {
        u32 bits = 0;
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++) {
            const float* at = s + i / 2 * 8 + i % 2 * 2;
            float by = less[i % 2];
            p[i] = weights4(at[0] - by, at[1] - by, at[4] - by, at[5] - by, bits);
        }
    }

    DEVICE static float octaves(float high) {
        return fminf(fmaxf(ceilf((high - TOP) / UNIT), -7000), 7000);
    }

    DEVICE void first(const float (&s)[KEYS / 2], u32 (&p)[KEYS / 8]) {
        float high[2], less[2];
        highest(s, high);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            off[r] = octaves(high[r]);
            less[r] = off[r] * UNIT;
            decay[r] = 1;
        }
        weigh_less(s, p, less);
    }

    DEVICE void step(const float (&s)[KEYS / 2], u32 (&p)[KEYS / 8]) {
        u32 bits = weigh(s, p);
        raised = __any_sync(~0u, bits & 0x40004000);
        if (raised) {
            float high[2], less[2];
            highest(s, high);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float by = high[r] >= 1.99f ? octaves(high[r]) : 0;
                decay[r] = exp2_fast(-by);
                off[r] += by;
                less[r] = by * UNIT;
            }
            weigh_less(s, p, less);
        }
    }
};

// Writes -off as digits into columns that pad queries. The keys there are 2, 1/32, 1/8, 1/512 and,
// for the remainder, 1/8, 1/512.
DEVICE void refer(u32 (&q)[12], const Softmax& softmax, int thread) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float off = -softmax.off[r];
        u32 first = code(rintf(off * 0.0625f));
        off -= 16 * decoded(first);
        u32 second = code(off);
        u32 third = code(off - decoded(second));
        first |= first << 8 | second << 16 | second << 24;
        third |= third << 8;
        q[10 + r] = thread % 4 == 0 ? first : thread % 4 == 1 ? third : 0;
    }
}

DEVICE void scores_begin(float (&s)[KEYS / 2], const u32 (&q)[12], const Ring& ring, Place place) {
    u32 further = place.stage * (STAGE_BYTES / 16), keys = ring.keys + further;
    u32 rest = REST ? ring.keys_last + further - (further << 16) : ring.keys_last;
    multiply_qk<K_WORD>(s, q[0], q[1], q[2], q[3], keys, 0);
    multiply_qk<K_WORD>(s, q[4], q[5], q[6], q[7], keys + 2, 1);
    multiply_qk<REST_WORD>(s, q[8], q[9], q[10], q[11], rest, 1);
    wgmma_commit();
}

DEVICE void sums_begin(float (&o)[COLUMNS / 2], const u32 (&p)[KEYS / 8], const Ring& ring,
                       Place place, int add) {
    u32 values = ring.values + place.stage * (STAGE_BYTES / 16);
#pragma unroll
    for (int i = 0; i < KEYS / 32; i++)
        multiply_pv<V_WORD>(o, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3], values + i * 2,
                            i ? 1 : add);
    wgmma_commit();
}

// The sums in float32.
struct Sums {
    float all[COLUMNS / 2];
    DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++) all[i] = 0;
    }
    DEVICE void add(const float (&o)[COLUMNS / 2]) {
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++) all[i] += o[i];
    }
    DEVICE void scale(const float (&by)[2]) {
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++) all[i] *= by[i / 2 % 2];
    }
};

DEVICE void store(ELEMENT* qkv, const int* tokens, int heads, const Work& work, int first,
                  const float (&o)[COLUMNS / 2], int thread, float scale) {
    int lane = thread % 32;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = first + thread / 32 * 16 + lane / 4 + 8 * r;
        float share = scale / __shfl_sync(~0u, o[COLUMNS / 2 - 4 + 2 * r], lane & 28);
        if (row >= work.end) continue;
        long long at = (long long)__ldg(tokens + row) * 3 * heads + work.head;
        u32* to = (u32*)(qkv + at * SIZE) + lane % 4;
#pragma unroll
        for (int c = 0; c < SIZE / 8; c++)
            to[c * 4] = pair(o[4 * c + 2 * r] * share, o[4 * c + 2 * r + 1] * share);
    }
}

// Zeroes the values of keys beyond the segment: their weights are zero, but 0 x NaN would be NaN.
DEVICE void clear_values(u32 v, int from, int group, int thread) {
    for (int i = thread; i < SIZE * KEYS / 4; i += 128) {
        int row = i / (KEYS / 4), key = i % (KEYS / 4) * 4;
        u32 at = v + row * KEYS + (key / 16 ^ row % 8) * 16 + key % 16, kept = 0;
        if (key + 4 > from) {
            if (key < from) {
                asm volatile("ld.shared.u32 %0, [%1];" : "=r"(kept) : "r"(at));
                kept &= (1u << (from - key) * 8) - 1;
            }
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(kept) : "memory");
        }
    }
    publish();
    meet<128>(1 + group);
}

DEVICE void mask(float (&s)[KEYS / 2], int keys, int thread) {
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) {
        int block = i / 4, key = block / 2 * 16 + thread % 4 * 4 + block % 2 * 2 + i % 2;
        if (key >= keys) s[i] = -INFINITY;
    }
}

DEVICE void load_queries(u32 (&q)[12], const unsigned char* qk, int heads, const Work& work,
                         int first, int thread) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = min(first + thread / 32 * 16 + thread % 32 / 4 + 8 * r, work.end - 1);
        const u32* from = (const u32*)(qk + ((long long)row * 2 * heads + work.head) * PITCH) +
                          thread % 4;
        q[r] = __ldg(from);
        q[2 + r] = __ldg(from + 4);
        q[4 + r] = __ldg(from + 8);
        q[6 + r] = __ldg(from + 12);
        q[8 + r] = REST ? __ldg(from + 16) : 0;
        q[10 + r] = 0;
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

DEVICE void compute(const Ring& ring, Place& place, const Work& work, u32 (&q)[12],
                    float (&o)[COLUMNS / 2], Sums& sums, int thread, int group) {
    float s[KEYS / 2];
    u32 p[KEYS / 8];
    Softmax softmax;
    int blocks = work.blocks(), left = FLUSH, add = 0;
    bool frees = thread % 32 < CLUSTER;
    ring.wait_k(place);
    wgmma_begin();
    scores_begin(s, q, ring, place);
    bool partial = work.last_keys() < KEYS;
    if (partial) {
        ring.wait_v(place);
        clear_values(ring.v(place), work.last_keys(), group, thread);
    }
    wgmma_wait<0>();
    pin(s);
    if (frees) ring.free_k(place);
    if (partial) mask(s, work.last_keys(), thread);
    softmax.first(s, p);
    refer(q, softmax, thread);
    ring.wait_v(place);
    u32 other[KEYS / 8];
    // Also issues the GEMM of the next block's scores, so that their softmax overlaps with the GEMM
    // of the sums.
    auto advance = [&](u32(&p)[KEYS / 8], u32(&next)[KEYS / 8]) {
        Place here = place;
        place.next();
        ring.wait_k(place);
        wgmma_begin();
        scores_begin(s, q, ring, place);
        sums_begin(o, p, ring, here, add);
        add = 1;
        wgmma_wait<1>();
        pin(s);
        if (frees) ring.free_k(place);
        softmax.step(s, next);
        wgmma_wait<0>();
        pin(o);
        hold(p);
        hold(next);
        if (frees) ring.free_v(here);
        if (--left == 0) {
            sums.add(o);
            add = 0;
            left = FLUSH;
        }
        if (softmax.raised) {
#pragma unroll
            for (int i = 0; i < COLUMNS / 2; i++) o[i] *= softmax.decay[i / 2 % 2];
            sums.scale(softmax.decay);
            refer(q, softmax, thread);
        }
        ring.wait_v(place);
    };
#pragma unroll 1
    for (blocks--; blocks >= 2; blocks -= 2) {
        advance(p, other);
        advance(other, p);
    }
    if (blocks) {
        advance(p, other);
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++) p[i] = other[i];
    }
    wgmma_begin();
    sums_begin(o, p, ring, place, add);
    wgmma_wait<0>();
    pin(o);
    hold(p);
    if (frees) ring.free_v(place);
    place.next();
    sums.add(o);
}

DEVICE void compute_all(ELEMENT* qkv, const unsigned char* qk, const int* tokens,
                        const int4* table, const Plan& plan, const Ring& ring, int group,
                        int thread, float scale) {
    float o[COLUMNS / 2];
    u32 q[12];
    int turn = 0;
    Place place;
    Sums sums;
    int4 entry = plan.entry(table, plan.begin);
    for (int item = plan.begin; item < plan.end; item += plan.crews) {
        Work work(plan, item, entry);
        entry = plan.entry(table, item + plan.crews);
        if (work.strips == 0) continue;
        int blocks = work.blocks();
        for (int round = 0; round < work.strips; round += TOGETHER) {
            int strip = round + work.first(ring.rank, group, turn);
            if (strip >= work.strips) {
                skip(ring, place, blocks);
                continue;
            }
            load_queries(q, qk, plan.heads, work, work.row + 64 * strip, thread);
            sums.clear();
#pragma unroll
            for (int i = 0; i < COLUMNS / 2; i++) o[i] = 0;
            compute(ring, place, work, q, o, sums, thread, group);
            store(qkv, tokens, plan.heads, work, work.row + 64 * strip, sums.all, thread, scale);
        }
        turn = work.next(turn);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) __cluster_dims__(CLUSTER)
    attend(ELEMENT* qkv, const unsigned char* qk, const int* tokens, const int4* table,
           const __grid_constant__ Maps maps, int heads, int launch, int launches,
           float scale) {
    extern __shared__ unsigned char memory[];
    __shared__ u64 barriers[4 * STAGES];
    Ring ring((shared_address(memory) + 1023) & ~1023u, shared_address(barriers));
    if (threadIdx.x == 0) {
        ring.initialise();
        prefetch(maps.keys);
        prefetch(maps.values);
    }
    // The 8 rows after the values of each stage: one of ones (0x38), seven of zeros.
    constexpr int CHUNKS = KEYS / 16;
    for (int i = threadIdx.x; i < STAGES * 8 * CHUNKS; i += THREADS) {
        int within = i % (8 * CHUNKS);
        u32 word = within < CHUNKS ? 0x38383838 : 0;
        store16(ring.tiles + i / (8 * CHUNKS) * STAGE_BYTES + SIZE * KEYS + within * 16, word, word);
    }
    for (int i = threadIdx.x; i < KEYS; i += THREADS)
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %3};" ::"r"(ring.units + i * 16),
                     "r"(0x01201040), "r"(0x0120), "r"(0) : "memory");
    publish();
    Plan plan(table, heads, launch, launches);
    cluster_publish();
    depend_wait();
    int group = uniform(threadIdx.x / 128), thread = threadIdx.x % 128;
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(24));
        if (thread == 0) copy_blocks(maps, table, plan, ring);
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(240));
        compute_all(qkv, qk, tokens, table, plan, ring, group - 1, thread, scale);
    }
    cluster_leave();
}
