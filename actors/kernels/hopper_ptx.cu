// Instructions of compute capability 9.0 that have no C++ name. Part of hopper.cu, read before it.

typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__
#define INFINITY __int_as_float(0x7f800000)

DEVICE u32 shared_address(const void* pointer) {
    return (u32)__cvta_generic_to_shared(pointer);
}

DEVICE void barrier_init(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives when all that this thread has copied with copy16 is there.
DEVICE void barrier_arrive_copied(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

DEVICE void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nretry:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra ready;\nbra retry;\nready:\n}" ::"r"(barrier), "r"(parity) : "memory");
}

// For tiles copied by ordinary means: the matrix unit must see them too.
DEVICE void barrier_wait_full(u32 barrier, u32 parity) {
    barrier_wait(barrier, parity);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Through the L1 cache, where the two halves of a 32-byte sector meet: twice as fast as past it.
DEVICE void copy16(u32 to, const ELEMENT* from, bool real) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(real ? 16 : 0) : "memory");
}

// Shared memory as the matrix unit reads it, without swizzle; offsets in bytes.
DEVICE u64 descriptor(u32 address, u32 leading, u32 stride) {
    return (u64)(address >> 4 & 0x3fff) | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32;
}

template <int N>
DEVICE void pin(float (&values)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(values[i])::"memory");
}

DEVICE void products_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

DEVICE void products_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING>
DEVICE void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE u32 pair(float first, float second) {
    u32 both;
    asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    return both;
}

// The two computing groups take turns at the matrix unit: while one multiplies, the other weighs.
DEVICE void turn_wait(int group) {
    asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory");
}

DEVICE void turn_give(int group) {
    asm volatile("bar.arrive %0, 256;" ::"r"(1 + group) : "memory");
}
