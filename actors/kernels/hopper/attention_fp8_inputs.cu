// Makes the inputs of attention_fp8.cu: queries, keys and values of long segments in e4m3, in
// slots. Rotates queries and keys of the others in place, for attention in 16 bits.
// attention_fp8.py explains slots, and defines SIZE, ROTARY, and the scales QK_SCALE and V_SCALE.
//
// A block takes 32 slots, so that it fills whole sectors of the transposed values, and a part of the
// heads. A thread keeps the angles of four pairs of columns of one slot, for all of its heads.

constexpr int HALF = SIZE / 2, PARTS = HALF / 4, SLOTS = 32, THREADS = SLOTS * PARTS;
constexpr int WARPS = THREADS / 32;
constexpr int BATCH = 4;  // heads that a thread loads before it stores any of them
constexpr int PITCH = SIZE > 64 ? 80 : 64;
constexpr int QUADS = (SIZE + 15) / 16;  // of 4 x 4 columns

DEVICE u32 codes(float a, float b, float c, float d) {
    u32 all;
    asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\nmov.b32 %0, {low, high};\n}"
        : "=r"(all) : "f"(a), "f"(b), "f"(c), "f"(d));
    return all;
}

DEVICE void unpack(float (&to)[4], uint2 both) {
    to[0] = low(both.x), to[1] = high(both.x), to[2] = low(both.y), to[3] = high(both.y);
}

DEVICE void load4(float (&to)[4], const float* from) {
    float4 all = *(const float4*)from;
    to[0] = all.x, to[1] = all.y, to[2] = all.z, to[3] = all.w;
}

DEVICE void rotated(float (&x)[4], float (&y)[4], const float (&c)[4], const float (&s)[4]) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float first = x[j];
        x[j] = first * c[j] - y[j] * s[j];
        y[j] = y[j] * c[j] + first * s[j];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    prepare(ELEMENT* qkv, const float* cos, const float* sin, const int* tokens, unsigned char* qk,
            unsigned char* v, int slots, int heads) {
    depend_wait();
    int begin = blockIdx.x * SLOTS, slot = begin + threadIdx.x / PARTS;
    int part = threadIdx.x % PARTS;
    int token = slot < slots ? __ldg(tokens + slot) : -1;
    bool chosen = token >= 0;
    if (!chosen) token = -2 - token;
    if (token >= 0 && (ROTARY || chosen)) {
        float c[4] = {1, 1, 1, 1}, s[4] = {0, 0, 0, 0};
        if (ROTARY) {
            load4(c, cos + (long long)token * HALF + part * 4);
            load4(s, sin + (long long)token * HALF + part * 4);
        }
        int count = 2 * heads / gridDim.y, first = blockIdx.y * count;
        ELEMENT* from = qkv + ((long long)token * 3 * heads + first) * SIZE + part * 4;
        unsigned char* to = qk + ((long long)slot * 2 * heads + first) * PITCH + part * 4;
        if (chosen)
#pragma unroll
            for (int j = 0; j < 4; j++) c[j] *= QK_SCALE, s[j] *= QK_SCALE;
        for (int start = 0; start < count; start += BATCH) {
            uint2 loaded[BATCH][2];
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                const ELEMENT* at = from + min(start + i, count - 1) * SIZE;
                loaded[i][0] = *(const uint2*)at;
                loaded[i][1] = *(const uint2*)(at + HALF);
            }
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                if (start + i >= count) break;
                float x[4], y[4];
                unpack(x, loaded[i][0]);
                unpack(y, loaded[i][1]);
                rotated(x, y, c, s);
                if (chosen) {
                    unsigned char* head = to + (start + i) * PITCH;
                    *(u32*)head = codes(x[0], x[1], x[2], x[3]);
                    *(u32*)(head + HALF) = codes(y[0], y[1], y[2], y[3]);
                    if (SIZE == 72 && part < 2) *(u32*)(head + SIZE) = 0;
                } else {
                    ELEMENT* head = from + (start + i) * SIZE;
                    *(uint2*)head = make_uint2(pair(x[0], x[1]), pair(x[2], x[3]));
                    *(uint2*)(head + HALF) = make_uint2(pair(y[0], y[1]), pair(y[2], y[3]));
                }
            }
        }
    }
    int lane = threadIdx.x % 32, from[4];
    slot = begin + lane / 4 * 4;
    bool any = false;
    for (int j = 0; j < 4; j++) {
        from[j] = slot < slots ? __ldg(tokens + slot + j) : -1;
        any |= from[j] >= 0;
    }
    if (!any) return;
#pragma unroll 2
    for (int i = blockIdx.y * WARPS + threadIdx.x / 32; i < heads * QUADS; i += WARPS * gridDim.y) {
        int head = i / QUADS, column = (i % QUADS * 4 + lane % 4) * 4;
        if (column >= SIZE) continue;
        float x[4][4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            long long row = max(from[j], 0);
            unpack(x[j], *(const uint2*)(qkv + ((row * 3 + 2) * heads + head) * SIZE + column));
#pragma unroll
            for (int k = 0; k < 4; k++) x[j][k] *= V_SCALE;
        }
        unsigned char* to = v + (long long)(head * SIZE + column) * slots + slot;
#pragma unroll
        for (int k = 0; k < 4; k++)
            *(u32*)(to + (long long)k * slots) = codes(x[0][k], x[1][k], x[2][k], x[3][k]);
    }
}
