// A GEMM with few rows, for compute capability 9.0: out [rows, features] from x [rows, k] and
// weight [features, k]. skinny_gemm.py defines TYPE, ELEMENT, GROUPS, ROWS, SPLITS, STAGES and
// EPILOGUE, and compiles this after ptx.cu and the wgmma function that it generates.
//
// With few rows the gaps between kernels cost as much as the GEMMs. So a block prefetches weights,
// which no kernel writes, before it waits for the previous kernel. The rows of x are the columns
// (N) of wgmma, because N is a multiple of 8, while the features are M, a multiple of 64.
//
// A block computes a tile of 64 GROUPS features x ROWS rows: one thread issues the TMA loads, and
// each warpgroup computes 64 features. Where there are fewer tiles than SMs, a cluster of SPLITS
// blocks splits k, exchanges partial sums, and each block finishes a part of the rows. Output tiles
// lie in shared memory as rows of 64 features: 128 bytes, swizzled.

constexpr int EIGHTS = ROWS / 8;                         // groups of 8 rows
constexpr int SHARE = (EIGHTS + SPLITS - 1) / SPLITS;    // groups that a block finishes
constexpr int WEIGHT_BYTES = GROUPS * 64 * 128;
constexpr int STAGE_BYTES = WEIGHT_BYTES + ROWS * 128;
constexpr int COMPUTING = 128 * GROUPS;                  // consumer threads
constexpr bool ADDS = EPILOGUE == 2;

struct Maps {
    TensorMap x, weight, out;
};

struct Ring {
    u32 stages, added, full, empty, full_added;
    DEVICE Ring(u32 memory, u32 barriers)
        : stages(memory),
          added(memory + STAGES * STAGE_BYTES),
          full(barriers),
          empty(full + 8 * STAGES),
          full_added(empty + 8 * STAGES) {}
    DEVICE void initialise() const {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, 4 * GROUPS);
        }
        barrier_init(full_added, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
};

// The work of this block: a tile, over the blocks of 64 columns [begin, begin + blocks) of k.
struct Part {
    int feature, row, begin, blocks, first, end;  // first, end: the groups of 8 rows that it finishes
    DEVICE Part(int all) {
        int split = SPLITS > 1 ? blockIdx.z : 0;
        feature = blockIdx.x * 64 * GROUPS;
        row = blockIdx.y * ROWS;
        begin = split * all / SPLITS;
        blocks = (split + 1) * all / SPLITS - begin;
        first = split * SHARE;
        end = min(first + SHARE, EIGHTS);
    }
};

DEVICE void copy_weight(const Maps& maps, const Part& part, const Ring& ring, int block, int stage) {
    barrier_expect(ring.full + 8 * stage, STAGE_BYTES);
    tensor_copy(ring.stages + stage * STAGE_BYTES, maps.weight, (part.begin + block) * 64,
                part.feature, ring.full + 8 * stage);
}

DEVICE void copy_x(const Maps& maps, const Part& part, const Ring& ring, int block, int stage) {
    tensor_copy(ring.stages + stage * STAGE_BYTES + WEIGHT_BYTES, maps.x,
                (part.begin + block) * 64, part.row, ring.full + 8 * stage);
}

DEVICE void copy_all(const Maps& maps, const Part& part, const Ring& ring) {
    int first = min(STAGES, part.blocks);
    for (int i = 0; i < first; i++) copy_weight(maps, part, ring, i, i);
    depend_wait();
    for (int i = 0; i < first; i++) copy_x(maps, part, ring, i, i);
    if (ADDS) {
        barrier_expect(ring.full_added, (part.end - part.first) * GROUPS * 1024);
        for (int group = 0; group < GROUPS; group++)
            for (int i = part.first; i < part.end; i++)
                tensor_copy(ring.added + (group * SHARE + i - part.first) * 1024, maps.out,
                            part.feature + 64 * group, part.row + 8 * i, ring.full_added);
    }
    Place place;
    for (int i = STAGES; i < part.blocks; i++) {
        barrier_wait(ring.empty + 8 * place.stage, place.parity);
        copy_weight(maps, part, ring, i, place.stage);
        copy_x(maps, part, ring, i, place.stage);
        place.next();
    }
}

// This warpgroup's accumulators: a thread holds 2 features, 8 apart, of 2 rows of every 8.
DEVICE void compute(float (&sums)[ROWS / 2], const Part& part, const Ring& ring, int group) {
    Place place, before;
    for (int i = 0; i < part.blocks; i++) {
        barrier_wait(ring.full + 8 * place.stage, place.parity);
        u32 stage = uniform(ring.stages + place.stage * STAGE_BYTES);
        u64 weight = swizzled(stage + group * 64 * 128, 0);
        u64 x = swizzled(stage + WEIGHT_BYTES, 0);
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < 4; k++) multiply(sums, weight + 2 * k, x + 2 * k, i + k > 0);
        wgmma_commit();
        wgmma_wait<1>();
        if (i > 0 && threadIdx.x % 32 == 0) barrier_arrive(ring.empty + 8 * before.stage);
        before = place;
        place.next();
    }
    wgmma_wait<0>();
    pin(sums);
}

DEVICE float gelu(float x) {
    return 0.5f * x * tanh_fast(x * (0.7978845608f + 0.0356774081f * x * x)) + 0.5f * x;
}

// Writes one group of 8 rows to shared memory, 4 sums per thread, adding what lies there if ADDS.
DEVICE void end_eight(u32 eight, const float (&sums)[4], float bias, float bias8) {
    int lane = threadIdx.x % 32, chunk = threadIdx.x % 128 / 32 * 2 + lane / 8 % 2;
    u32 to = eight + lane % 8 * 128 + (chunk ^ lane % 8) * 16;
    float v[4] = {sums[0] + bias, sums[1] + bias, sums[2] + bias8, sums[3] + bias8};
    if (EPILOGUE == 1)
        for (int k = 0; k < 4; k++) v[k] = gelu(v[k]);
    if (ADDS) {
        u32 added[2];
        load_transposed(added, to);
        v[0] += low(added[0]), v[1] += high(added[0]), v[2] += low(added[1]), v[3] += high(added[1]);
    }
    store_transposed(to, pair(v[0], v[1]), pair(v[2], v[3]));
}

#if SPLITS > 1
// Adds up the blocks' partial sums of the rows that this block finishes, always in the same order.
DEVICE void reduce(float (&ended)[SHARE][4], const float (&sums)[ROWS / 2], const Part& part,
                   const Ring& ring, int group) {
    u32 mine = ring.stages + group * EIGHTS * 2048 + threadIdx.x % 128 * 16;
    meet<COMPUTING>(1);  // all warpgroups have read the stages
#pragma unroll
    for (int i = 0; i < EIGHTS; i++) store_floats(mine + i * 2048, sums + 4 * i);
    cluster_publish();
    float parts[SHARE][SPLITS][4];
#pragma unroll
    for (int i = 0; i < SHARE; i++)
#pragma unroll
        for (int split = 0; split < SPLITS; split++)
            load_floats(parts[i][split],
                        cluster_address(mine, split) + min(part.first + i, EIGHTS - 1) * 2048);
#pragma unroll
    for (int i = 0; i < SHARE; i++)
#pragma unroll
        for (int k = 0; k < 4; k++) {
            ended[i][k] = parts[i][0][k];
#pragma unroll
            for (int split = 1; split < SPLITS; split++) ended[i][k] += parts[i][split][k];
        }
}
#endif

DEVICE void store(const Maps& maps, const Part& part, u32 from, int group) {
    publish();
    meet<128>(2 + group);
    if (threadIdx.x % 128 / 32) return;
    for (int i = part.first + threadIdx.x % 32; i < part.end; i += 32)
        tensor_store(maps.out, part.feature + 64 * group, part.row + 8 * i,
                     from + (i - part.first) * 1024);
    tensor_stored();
}

DEVICE void compute_all(const Maps& maps, const ELEMENT* bias, int features, const Part& part,
                        const Ring& ring, int group) {
    float sums[ROWS / 2], own = 0, own8 = 0;
    int feature = part.feature + group * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    if (!ADDS && feature < features) own = low(bias[feature]);
    if (!ADDS && feature + 8 < features) own8 = low(bias[feature + 8]);
    compute(sums, part, ring, group);
    u32 to = (ADDS ? ring.added : ring.stages) + group * SHARE * 1024;
#if SPLITS > 1
    float ended[SHARE][4];
    reduce(ended, sums, part, ring, group);
#else
    if (!ADDS) meet<COMPUTING>(1);  // all warpgroups have read the stages
    const float(&ended)[SHARE][4] = reinterpret_cast<const float(&)[SHARE][4]>(sums);
#endif
    if (ADDS) barrier_wait(ring.full_added, 0);
#pragma unroll
    for (int i = 0; i < SHARE; i++)
        if (part.first + i < part.end) end_eight(to + i * 1024, ended[i], own, own8);
    store(maps, part, to, group);
}

extern "C" __global__ void __cluster_dims__(1, 1, SPLITS) __launch_bounds__(COMPUTING + 32, 1)
    multiply_few(const __grid_constant__ Maps maps, const ELEMENT* bias, int blocks, int features) {
    extern __shared__ unsigned char memory[];
    __shared__ u64 barriers[2 * STAGES + 1];
    // The swizzle depends on the address, so the buffer starts at a multiple of 1024 bytes.
    Ring ring((shared_address(memory) + 1023) & ~1023u, shared_address(barriers));
    if (threadIdx.x == 0) ring.initialise();
    if (threadIdx.x == COMPUTING) {
        prefetch(maps.weight);
        prefetch(maps.x);
        prefetch(maps.out);
    }
    __syncthreads();
    Part part(blocks);
    int group = uniform(threadIdx.x / 128);
    if (group < GROUPS) compute_all(maps, bias, features, part, ring, group);
    else if (threadIdx.x == COMPUTING) copy_all(maps, part, ring);
    __syncwarp();
    if (SPLITS > 1) {
        if (group == GROUPS) cluster_publish();
        cluster_leave();
    }
}
