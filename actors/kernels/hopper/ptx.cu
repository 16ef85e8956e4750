// PTX instructions of compute capability 9.0 that have no C++ name, and helpers around them.
// cuda.py puts this file first in every kernel that it compiles.

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

// Arrives at a barrier of any block of the cluster; see cluster_address.
DEVICE void barrier_arrive_at(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and makes the phase wait for `bytes` more bytes from tensor_copy.
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

// TMA load: the box of the tensor map at (row, column) into shared memory.
DEVICE void tensor_copy(u32 to, const TensorMap& map, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}

// The same into the shared memory of all `blocks` of the cluster, at one offset and barrier.
DEVICE void tensor_copy_to_all(u32 to, const TensorMap& map, int column, int row, u32 barrier,
                               int blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(&map), "r"(column),
        "r"(row), "r"(barrier), "h"((unsigned short)((1 << blocks) - 1))
        : "memory");
}

DEVICE void prefetch(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// TMA store: a box in shared memory to (row, column) of the matrix that the tensor map describes.
DEVICE void tensor_store(const TensorMap& map, int column, int row, u32 from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(
                     &map), "r"(column), "r"(row), "r"(from) : "memory");
}

// Waits until this thread's tensor_stores have read their shared memory.
DEVICE void tensor_stored() {
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
}

DEVICE void store16(u32 to, u32 first, u32 rest) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %2, %2};" ::"r"(to), "r"(first), "r"(rest)
                 : "memory");
}

// Makes what this thread has stored in shared memory visible to wgmma and TMA.
DEVICE void publish() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// From global memory that nothing writes while the kernel runs. The compiler does not delay them.
DEVICE u32 load2(const unsigned short* from) {
    unsigned short value;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(value) : "l"(from));
    return value;
}

DEVICE u32 load4(const u32* from) {
    u32 value;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(value) : "l"(from));
    return value;
}

// Four 8 x 8 matrices; each thread gives the address of one row of one of them.
DEVICE void load_matrices(u32* to, u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}

// Two 8 x 8 matrices between shared memory and accumulators, transposed.
DEVICE void load_transposed(u32 (&to)[2], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(to[0]), "=r"(to[1]) : "r"(from) : "memory");
}

DEVICE void store_transposed(u32 to, u32 first, u32 second) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to),
                 "r"(first), "r"(second) : "memory");
}

DEVICE void store_floats(u32 to, const float* from) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(from[0]), "f"(from[1]),
                 "f"(from[2]), "f"(from[3]) : "memory");
}

// From the shared memory of another block of the cluster; see cluster_address.
DEVICE void load_floats(float (&to)[4], u32 from) {
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3]) : "r"(from));
}

DEVICE u32 cluster_address(u32 address, u32 block) {
    u32 theirs;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(address), "r"(block));
    return theirs;
}

DEVICE u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Cluster barrier, after which all threads see what the others have stored.
DEVICE void cluster_publish() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" :::
                     "memory");
}

// Cluster barrier, so that no block exits while others still read its shared memory.
DEVICE void cluster_leave() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" :::
                     "memory");
}

// The low word of a wgmma descriptor: an address, and the distance to the next columns.
DEVICE u32 low_word(u32 address, u32 leading) {
    return (address >> 4 & 0x3fff) | leading >> 4 << 16;
}

// wgmma descriptor of rows of 128 bytes, swizzled in groups of eight. `leading`: bytes from the
// first 64 columns to the next ones.
DEVICE u64 swizzled(u32 address, u32 leading) {
    return (u64)(address >> 4 & 0x3fff) | (u64)(leading >> 4) << 16 | (u64)(1024 >> 4) << 32 |
           1ull << 62;
}

template <int N>
DEVICE void pin(float (&values)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(values[i])::"memory");
}

template <int N>
DEVICE void hold(u32 (&values)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+r"(values[i])::"memory");
}

DEVICE void wgmma_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

DEVICE void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING>
DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float tanh_fast(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float low(u32 both) {
    float first;
    asm("{\n.reg .b16 first, second;\nmov.b32 {first, second}, %1;\ncvt.f32." TYPE " %0, first;\n}"
        : "=f"(first) : "r"(both));
    return first;
}

DEVICE float high(u32 both) {
    constexpr bool BF16 = TYPE[0] == 'b';  // whose bits are the first half of a float's
    return BF16 ? __int_as_float(both & 0xffff0000) : low(both >> 16);
}

DEVICE u32 pair(float first, float second) {
    u32 both;
    asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    return both;
}

// Programmatic dependent launch: lets the next kernel start, and waits until everything that
// earlier kernels wrote can be read.
DEVICE void depend_wait() {
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

template <int THREADS>
DEVICE void meet(int barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}

// Broadcasts a value that is equal in all threads of a warp, so that the compiler knows it is.
DEVICE u32 uniform(u32 value) {
    return __shfl_sync(~0u, value, 0);
}

// A stage of the ring, and the parity of the current round.
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
