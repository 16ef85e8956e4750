// Instructions of compute capability 9.0 that have no C++ name. Part of hopper.cu, read before it.

typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__
#define INFINITY __int_as_float(0x7f800000)

struct __align__(64) TensorMap {
    u64 words[16];
};

DEVICE u32 shared_address(const void* pointer) {
    return (u32)__cvta_generic_to_shared(pointer);
}

DEVICE void barrier_init(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and adds bytes that tensor_copy will bring to what the phase waits for.
DEVICE void barrier_expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                 "r"(bytes) : "memory");
}

DEVICE void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nretry:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra ready;\nbra retry;\nready:\n}" ::"r"(barrier), "r"(parity) : "memory");
}

// What a tensor map describes, rows of it from (row, column) on, into shared memory.
DEVICE void tensor_copy(u32 to, const TensorMap& map, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}

DEVICE void prefetch(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

DEVICE void store16(u32 to, u32 first, u32 rest) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %2, %2};" ::"r"(to), "r"(first), "r"(rest)
                 : "memory");
}

// What this thread has stored in shared memory, for the matrix unit.
DEVICE void publish() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Four 8 x 8 matrices; each thread gives the address of one row of one of them.
DEVICE void load_matrices(u32* to, u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}

// Rows of 128 bytes swizzled in eights, as the matrix unit reads them. `leading`: bytes from the
// first 64 columns to the next ones.
DEVICE u64 swizzled(u32 address, u32 leading) {
    return (u64)(address >> 4 & 0x3fff) | (u64)(leading >> 4) << 16 | (u64)(1024 >> 4) << 32 |
           1ull << 62;
}

// Rows of 32 bytes, swizzled in eights, or of 16, the second half of each being the first again.
DEVICE u64 narrow(u32 address, int bytes) {
    return (u64)(address >> 4 & 0x3fff) | (u64)(8 * bytes >> 4) << 32 | (bytes > 16 ? 3ull << 62 : 0);
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

// Until all that the kernels before this one have written can be read, and lets the kernel behind it
// begin: where the launch says so they overlap.
DEVICE void depend_wait() {
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

template <int THREADS>
DEVICE void meet(int barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}

// The same value in all threads of a warp, in a form from which the compiler knows it.
DEVICE u32 uniform(u32 value) {
    return __shfl_sync(~0u, value, 0);
}
