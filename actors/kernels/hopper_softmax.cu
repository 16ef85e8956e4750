// The softmax of a row while its keys pass by, and what follows from it. Part of hopper.cu.
//
// A thread holds of rows lane / 4 and lane / 4 + 8 of its warp, columns 2 (lane % 4) + {0, 1} of
// each 8. The sums' columns end with that of the weights.

constexpr int CHUNKS = SIZE / 8;
constexpr int COLUMNS = SIZE + 8;  // of the sums; the values end with a column of ones
// Weights may exceed 1 by this power of two before all is brought to a larger maximum.
constexpr float SLACK = 8;

// Weights are relative to a reference, which follows a row's largest score only where that is
// larger by more than SLACK: rarely after the first block, and for all other blocks there is no
// exchange between threads and nothing to scale.
struct Softmax {
    float top[2] = {-INFINITY, -INFINITY}, decay[2] = {1, 1};
    bool raised = false;

    // Scores to weights, in place.
    DEVICE void step(float (&s)[KEYS / 2]) {
        float high[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float even = s[2 * r], odd = s[2 * r + 1];
#pragma unroll
            for (int i = 2 * r + 4; i < KEYS / 2; i += 4) {
                even = fmaxf(even, s[i]);
                odd = fmaxf(odd, s[i + 1]);
            }
            high[r] = fmaxf(even, odd);
        }
        raised = __any_sync(~0u, high[0] > top[0] + SLACK / SCALE || high[1] > top[1] + SLACK / SCALE);
        if (raised)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float most = fmaxf(high[r], __shfl_xor_sync(~0u, high[r], 1));
                most = fmaxf(top[r], fmaxf(most, __shfl_xor_sync(~0u, most, 2)));
                decay[r] = exp2_fast((top[r] - most) * SCALE);
                top[r] = most;
            }
        float offset[2] = {top[0] * SCALE, top[1] * SCALE};
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++) s[i] = exp2_fast(s[i] * SCALE - offset[i / 2 % 2]);
    }

    DEVICE void rescale(float (&o)[COLUMNS / 2]) const {
        if (raised)
#pragma unroll
            for (int i = 0; i < COLUMNS / 2; i++) o[i] *= decay[i / 2 % 2];
    }
};

// The groups' sums of one strip, brought to one reference, in the first group. Afterwards the copy
// engine may write to `scratch`.
DEVICE void merge(u32 scratch, float (&o)[COLUMNS / 2], Softmax& softmax, int group, int thread) {
    constexpr int TOP = COLUMNS / 2;
    float* at = (float*)__cvta_shared_to_generic(scratch) + thread;
    meet<128 * GROUPS>(1 + GROUPS);
#pragma unroll 1
    for (int other = 1; other < GROUPS; other++) {
        if (group == other) {
#pragma unroll
            for (int i = 0; i < TOP; i++) at[i * 128] = o[i];
            at[TOP * 128] = softmax.top[0];
            at[TOP * 128 + 128] = softmax.top[1];
        }
        meet<128 * GROUPS>(1 + GROUPS);
        if (group == 0) {
            float ours[2], theirs[2];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float top = at[TOP * 128 + 128 * r], most = fmaxf(top, softmax.top[r]);
                ours[r] = exp2_fast((softmax.top[r] - most) * SCALE);
                theirs[r] = exp2_fast((top - most) * SCALE);
                softmax.top[r] = most;
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
