// Attention within segments of a packed sequence, over the table of query tiles of tiles.py, on
// compute capability 9.0. hopper.py compiles it at run time behind hopper_ptx.cu and the products
// that it writes itself, and defines ELEMENT, TYPE, HEADS, SIZE, KEYS, STAGES and SCALE.
//
// A block stays on its processor and takes tile after tile. One warp group copies keys and values
// into a ring of stages; two compute 64 queries each: the products of one run while the other, and
// the first itself on its previous scores, goes through the softmax. Keys and values lie in shared
// memory as columns of 8, [SIZE / 8][KEYS][8]: the layout in which a head of 72 needs no padding.

constexpr int ROWS = 128;  // queries a tile; also the threads of the copying group
constexpr int STRIDE = 3 * HEADS * SIZE;
constexpr int CHUNKS = SIZE / 8;
constexpr int SLICES = (CHUNKS + 1) / 2;
constexpr int CHUNK_BYTES = KEYS * 16 + 16;  // the columns of a row in different banks
constexpr int TILE_BYTES = CHUNKS * CHUNK_BYTES;
constexpr int COPYING_REGISTERS = 56;
constexpr int COMPUTING_REGISTERS = 224;

// A place in the ring of stages and the parity of the round.
struct Place {
    int stage = 0;
    u32 parity = 0;
    DEVICE void next() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// One tile of queries of one head, from the table.
struct Work {
    int start, end, row, head;
    DEVICE Work(const int4* table, int item) {
        int4 entry = __ldg(table + 1 + item / HEADS);
        int within = item - entry.z * HEADS;
        start = entry.x;
        end = entry.y;
        head = within / entry.w;
        row = start + within % entry.w * ROWS;
    }
    // The last block of keys, the one that may be partial, comes first.
    DEVICE int blocks() const { return (end - start + KEYS - 1) / KEYS; }
    DEVICE int last_keys() const { return (end - start - 1) % KEYS + 1; }
};

// KEYS rows of one head; rows from `rows` on become zero: what lies there may hold NaN.
DEVICE void copy_tile(u32 to, const ELEMENT* from, int rows, int thread) {
#pragma unroll
    for (int i = 0; i < KEYS * CHUNKS; i += ROWS) {
        int row = (thread + i) / CHUNKS, chunk = (thread + i) % CHUNKS;
        if (KEYS * CHUNKS % ROWS == 0 || row < KEYS)
            copy16(to + chunk * CHUNK_BYTES + row * 16, from + row * STRIDE + chunk * 8,
                   row < rows);
    }
}

DEVICE void copy_all(const ELEMENT* qkv, const int4* table, int items, u32 tiles,
                                         u32 full, u32 empty, int thread) {
    Place place;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        Work work(table, item);
        // Blocks of one head begin at different keys, so as not to crowd the same lines of the L2.
        int rows = work.last_keys(), whole = work.blocks() - 1, at = item % max(whole, 1);
        const ELEMENT* first = qkv + (long long)work.start * STRIDE + (HEADS + work.head) * SIZE;
        const ELEMENT* k = first + (long long)whole * KEYS * STRIDE;
        for (int block = whole; block >= 0; block--) {
            barrier_wait(empty + 8 * place.stage, place.parity ^ 1);
            u32 to = tiles + place.stage * 2 * TILE_BYTES;
            copy_tile(to, k, rows, thread);
            copy_tile(to + TILE_BYTES, k + HEADS * SIZE, rows, thread);
            barrier_arrive_copied(full + 8 * place.stage);
            place.next();
            rows = KEYS;
            at = at + 1 < whole ? at + 1 : 0;
            k = first + (long long)at * KEYS * STRIDE;
        }
    }
}

DEVICE void scores_begin(float (&s)[KEYS / 2], const u32 (&q)[SLICES * 4], u32 k) {
#pragma unroll
    for (int i = 0; i < SLICES; i++) {
        // Of an odd last column only the first half counts: the queries are zero in the second.
        u32 leading = 2 * i + 1 < CHUNKS ? CHUNK_BYTES : 0;
        multiply_qk(s, q[4 * i], q[4 * i + 1], q[4 * i + 2], q[4 * i + 3],
                    descriptor(k + 2 * i * CHUNK_BYTES, leading, 128), i > 0);
    }
    products_commit();
}

DEVICE void sums_begin(float (&o)[SIZE / 2], const u32 (&p)[KEYS / 4], u32 v) {
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++)
        multiply_pv(o, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3],
                    descriptor(v + i * 256, 128, CHUNK_BYTES), 1);
    products_commit();
}

// What a thread holds: of rows lane / 4 and lane / 4 + 8, columns 2 (lane % 4) + {0, 1} of each 8.
struct Softmax {
    float top[2] = {-INFINITY, -INFINITY}, total[2] = {0, 0}, decay[2];

    // Scores to weights, in place.
    DEVICE void step(float (&s)[KEYS / 2]) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float high = top[r];
#pragma unroll
            for (int i = 2 * r; i < KEYS / 2; i += 4) high = fmaxf(high, fmaxf(s[i], s[i + 1]));
            high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
            high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
            decay[r] = exp2_fast((top[r] - high) * SCALE);
            top[r] = high;
            float offset = high * SCALE, sum = 0;
#pragma unroll
            for (int i = 2 * r; i < KEYS / 2; i += 4) {
#pragma unroll
                for (int j = i; j < i + 2; j++) s[j] = exp2_fast(s[j] * SCALE - offset);
                sum += s[i] + s[i + 1];
            }
            total[r] = total[r] * decay[r] + sum;
        }
    }
};

DEVICE void mask(float (&s)[KEYS / 2], int keys, int lane) {
    if (keys < KEYS)
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++)
            if (i / 4 * 8 + lane % 4 * 2 + i % 2 >= keys) s[i] = -INFINITY;
}

DEVICE void pack(u32 (&p)[KEYS / 4], const float (&s)[KEYS / 2]) {
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) p[i] = pair(s[2 * i], s[2 * i + 1]);
}

DEVICE void load_queries(u32 (&q)[SLICES * 4], const ELEMENT* qkv, const Work& work,
                                             int row, int lane) {
#pragma unroll
    for (int i = 0; i < SLICES * 4; i++) {
        int at = row + i % 2 * 8, chunk = i / 4 * 2 + i % 4 / 2;
        q[i] = 0;
        if (chunk < CHUNKS && at < work.end)
            q[i] = *(const u32*)(qkv + (long long)at * STRIDE + work.head * SIZE + chunk * 8 +
                                 lane % 4 * 2);
    }
}

DEVICE void store(ELEMENT* qkv, const Work& work, const float (&o)[SIZE / 2],
                                      Softmax& softmax, int row, int lane) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float total = softmax.total[r];
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        float share = 1 / total;
        ELEMENT* to = qkv + (long long)(row + 8 * r) * STRIDE + work.head * SIZE + lane % 4 * 2;
        if (row + 8 * r < work.end)
#pragma unroll
            for (int c = 0; c < CHUNKS; c++)
                *(u32*)(to + c * 8) = pair(o[4 * c + 2 * r] * share, o[4 * c + 2 * r + 1] * share);
    }
}

DEVICE void compute_all(ELEMENT* qkv, const int4* table, int items, u32 tiles, u32 full,
                                            u32 empty, int group, int thread) {
    int lane = thread % 32, offset = group * 64 + thread / 32 * 16 + lane / 4;
    float s[KEYS / 2], o[SIZE / 2];
    u32 p[KEYS / 4], q[SLICES * 4];
    Place place;
    int item = blockIdx.x;
    if (item >= items) return;
    if (group == 1) turn_give(0);
    Work work(table, item);
    load_queries(q, qkv, work, work.row + offset, lane);
    while (true) {
        Softmax softmax;
        barrier_wait_full(full + 8 * place.stage, place.parity);
        turn_wait(group);
        products_begin();
        scores_begin(s, q, tiles + place.stage * 2 * TILE_BYTES);
        turn_give(group ^ 1);
        products_wait<0>();
        pin(s);
        mask(s, work.last_keys(), lane);
        softmax.step(s);
        pack(p, s);
#pragma unroll
        for (int i = 0; i < SIZE / 2; i++) o[i] = 0;
        int blocks = work.blocks();
        Place ahead = place;
        ahead.next();
        if (blocks > 1) barrier_wait_full(full + 8 * ahead.stage, ahead.parity);
        for (int block = blocks; block > 1; block--) {
            int stage = place.stage;
            place.next();
            turn_wait(group);
            products_begin();
            scores_begin(s, q, tiles + place.stage * 2 * TILE_BYTES);
            sums_begin(o, p, tiles + stage * 2 * TILE_BYTES + TILE_BYTES);
            turn_give(group ^ 1);
            products_wait<1>();
            pin(s);
            softmax.step(s);
            pin(s);
            // This wait stands here, and not before the products that need it, because the compiler
            // moves the next one upwards, before the softmax, unless a branch lies between.
            ahead.next();
            if (block > 2) barrier_wait_full(full + 8 * ahead.stage, ahead.parity);
            products_wait<0>();
            pin(o);
            if (lane == 0) barrier_arrive(empty + 8 * stage);
#pragma unroll
            for (int i = 0; i < SIZE / 2; i++) o[i] *= softmax.decay[i / 2 % 2];
            pack(p, s);
        }
        products_begin();
        sums_begin(o, p, tiles + place.stage * 2 * TILE_BYTES + TILE_BYTES);
        Work done = work;
        item += gridDim.x;
        if (item < items) {
            work = Work(table, item);
            load_queries(q, qkv, work, work.row + offset, lane);
        }
        products_wait<0>();
        pin(o);
        if (lane == 0) barrier_arrive(empty + 8 * place.stage);
        place.next();
        store(qkv, done, o, softmax, done.row + offset, lane);
        if (item >= items) break;
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) attend(ELEMENT* qkv, const int4* table) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ u64 barriers[2 * STAGES];
    u32 full = shared_address(barriers), empty = full + 8 * STAGES, tiles = shared_address(memory);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + 8 * i, 128);  // the copying threads
            barrier_init(empty + 8 * i, 8);   // the computing warps
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    int items = __ldg(&table[0].x) * HEADS;
    int group = threadIdx.x / 128, thread = threadIdx.x % 128;
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COPYING_REGISTERS));
        copy_all(qkv, table, items, tiles, full, empty, thread);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COMPUTING_REGISTERS));
        compute_all(qkv, table, items, tiles, full, empty, group - 1, thread);
    }
}
