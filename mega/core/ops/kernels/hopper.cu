// Flash attention with dropout for NVIDIA GPUs of compute capability 9.0 (Hopper), for heads of 64 or 128.
//
// A block has one warp that loads and GROUPS warpgroups that compute. Each computing warpgroup owns 64 rows of a tile:
// queries in `forward` and `backward_queries`, keys in `backward_keys`. The loading warp streams the rows of the other
// side through shared memory, in steps of 64 rows. Blocks take tiles from a counter in memory, so the next tile is
// loaded while the last one is computed. The order of every sum is fixed, whichever block computes a tile.
//
// Scores are scaled by log2(e), because the device computes powers of 2. The dropout mask is bitwise that of
// ops/counter.py, and the sums are those of ops/kernels/attention.py, in the same order.
//
// Macros: WIDTH (64 or 128), FORWARD_GROUPS (2 or 4); if defined: HALF (fp16 instead of bf16), CAUSAL,
// DOCUMENTS, DROP.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
#define MEMBER __device__ __forceinline__
#define DEVICE static MEMBER
#undef INFINITY
#define INFINITY __int_as_float(0x7f800000)

constexpr int STEP = 64;                // rows of a step, and rows of a warpgroup
constexpr int HALVES = WIDTH / 64;      // swizzled rows have 128 bytes, so wider heads are stored in halves
constexpr u32 STEP_BYTES = STEP * 128;  // half of a step's rows

struct alignas(64) TensorMap {
    u64 data[16];
};

struct Strided {  // a tensor [b, s, heads, WIDTH]
    u16 *at;
    i64 batch, row, head;  // strides
};

struct Problem {
    u32 *counter;          // number of tiles that blocks have taken
    float *lse;            // [b, heads, s]
    uint4 *stats;          // [b, heads, s]: lse in base 2, delta, and the two halves of dropout's row key
    const i64 *keys;       // of dropout, [b, s]
    const i64 *documents;  // [b, s]
    const int *bounds;     // [b, tiles, 4]: the steps that a tile needs, from the documents
    i64 keys_stride, documents_stride, site;
    int batches, heads, length, first_head;
    float scale;                      // of scores, with log2(e)
    float first_scale, second_scale;  // of the results
    u32 threshold;                    // elements are dropped with probability threshold / 2^32
    int early, border, late;          // key j has column j + early if j < border, else j + late
    Strided first, second;            // results, or the inputs of `prepare`
};

struct alignas(16) Place {  // a tile, and the rows of the other side that it needs
    int tile, head, batch, exists, first, whole_first, whole_end, end;
};

template <int GROUPS_, int SIDES_, int BUFFERS_, int STAGES_> struct Shape {
    static constexpr int GROUPS = GROUPS_;    // computing warpgroups
    static constexpr int SIDES = SIDES_;      // tensors of which a tile has rows
    static constexpr int BUFFERS = BUFFERS_;  // tiles in shared memory
    static constexpr int STAGES = STAGES_;    // steps in shared memory
    static constexpr int TILE = STEP * GROUPS;
};

template <class S> struct Shared {
    alignas(1024) unsigned char tile[S::BUFFERS][S::SIDES][S::GROUPS][HALVES][STEP_BYTES];
    alignas(1024) unsigned char step[S::STAGES][2][HALVES][STEP_BYTES];
    alignas(1024) uint4 stats[S::STAGES][STEP];
    Place place[S::BUFFERS];
    u64 tile_full[S::BUFFERS], tile_empty[S::BUFFERS], full[S::STAGES], empty[S::STAGES];
};

// -- barriers and copies

DEVICE u32 address(const void *x) { return (u32)__cvta_generic_to_shared(x); }

DEVICE void init(u64 *barrier, u32 count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address(barrier)), "r"(count));
}

DEVICE void expect(u64 *barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(address(barrier)), "r"(bytes) : "memory");
}

DEVICE void arrive(u64 *barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(address(barrier)) : "memory");
}

DEVICE void wait(u64 *barrier, u32 phase) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@done bra over;\nbra again;\nover:\n}" ::"r"(
            address(barrier)),
        "r"(phase)
        : "memory");
}

// One arrival per warp.
DEVICE void release(u64 *barrier, int lane) {
    __syncwarp();
    if (lane == 0) arrive(barrier);
}

// 64 rows of one head
DEVICE void load(unsigned char (*to)[STEP_BYTES], const TensorMap *map, int head, int row, int batch, u64 *barrier) {
#pragma unroll
    for (int half = 0; half < HALVES; ++half)
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
            "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(address(to[half])),
            "l"(map), "r"(half * 64), "r"(head), "r"(row), "r"(batch), "r"(address(barrier))
            : "memory");
}

DEVICE void load_flat(void *to, const void *from, u32 bytes, u64 *barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(address(to)),
        "l"(from), "r"(bytes), "r"(address(barrier))
        : "memory");
}

// -- products of the tensor cores, which run beside other instructions until `finish`

#ifdef HALF
#define KIND "f16.f16"
#else
#define KIND "bf16.bf16"
#endif
#define SUMS                                                                                                          \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
    "%24, %25, %26, %27, %28, %29, %30, %31}"
#define OPERANDS                                                                                                \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), \
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),  \
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), \
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])

DEVICE void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DEVICE void finish() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Tell the compiler that values change here, so that it does not read registers of products that still run.
template <int N> DEVICE void settle(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
template <int N> DEVICE void settle(u32 (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(x[i])::"memory");
}
template <int M, int N> DEVICE void settle(float (&x)[M][N]) {
#pragma unroll
    for (int i = 0; i < M; ++i) settle(x[i]);
}

// The lower half of a matrix descriptor. Rows have 128 bytes and are swizzled; groups of 8 rows follow each other.
DEVICE u32 matrix(const void *x) { return address(x) >> 4 | 64 << 16; }
#define UPPER "0x40000040"

// d = a b', where a and b have 64 rows in shared memory. Although `a` is the same in all steps of a tile, it is not
// kept in registers: ptxas before CUDA 13.5 overwrites such operands within a loop.
DEVICE void multiply_rows(float (&d)[32], u32 a, u32 b) {
#pragma unroll
    for (int k = 0; k < WIDTH / 16; ++k) {
        u32 offset = k / 4 * (STEP_BYTES / 16) + k % 4 * 2;
        asm volatile(
            "{\n.reg .pred add;\n.reg .b64 a, b;\nsetp.ne.b32 add, %34, 0;\n"
            "mov.b64 a, {%32, " UPPER "};\nmov.b64 b, {%33, " UPPER
            "};\n"
            "wgmma.mma_async.sync.aligned.m64n64k16.f32." KIND " " SUMS ", a, b, add, 1, 1, 0, 0;\n}"
            : OPERANDS
            : "r"(a + offset), "r"(b + offset), "r"(k));
    }
}

// d += a b, where a [64, 64] is in registers and b [64, WIDTH] in shared memory.
DEVICE void add_product(float (&sums)[HALVES][32], const u32 (&a)[16], u32 b) {
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
        float (&d)[32] = sums[half];
#pragma unroll
        for (int k = 0; k < 4; ++k)
            asm volatile("{\n.reg .b64 b;\nmov.b64 b, {%36, " UPPER
                         "};\n"
                         "wgmma.mma_async.sync.aligned.m64n64k16.f32." KIND " " SUMS
                         ", {%32, %33, %34, %35}, b, 1, 1, 1, 1;\n}"
                         : OPERANDS
                         : "r"(a[4 * k]), "r"(a[4 * k + 1]), "r"(a[4 * k + 2]), "r"(a[4 * k + 3]),
                           "r"(b + half * (STEP_BYTES / 16) + k * 128));
    }
}

// -- numbers

DEVICE u32 packed(float low, float high) {
    u32 x;
#ifdef HALF
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
#endif
    return x;
}

DEVICE float unpacked(u16 x) {
#ifdef HALF
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
#else
    return __uint_as_float((u32)x << 16);
#endif
}

DEVICE void pack(u32 (&to)[16], const float (&x)[32]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) to[i] = packed(x[2 * i], x[2 * i + 1]);
}

DEVICE float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE u64 row_key(u64 key, i64 site, int number) {
    u64 z = (key + site + (u64)number * 0x2545F4914F6CDD1Dull) * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

DEVICE u32 fold(u32 x, u32 factor) {
    u64 product = (u64)x * factor;
    return (u32)product ^ (u32)(product >> 32);
}

// 32 random bits for two elements that are 8 apart. `group`: half the column of the first of 16 elements, plus 0 to 7.
DEVICE u32 draw(u32 low, u32 high, u32 group) { return fold(fold(low ^ group, 0xD2511F53u) ^ high, 0xCD9E8D57u); }

DEVICE u32 half_column(const Problem &p, int key) { return (u32)(key + (key >= p.border ? p.late : p.early)) / 2; }

// -- tiles

// KEYS: whether the rows of a tile are keys.
template <class S, bool KEYS> DEVICE Place place_of(const Problem &p, int work) {
    Place x;
    int tiles = p.length / S::TILE, rest = work / tiles;
    x.tile = KEYS ? work % tiles : tiles - 1 - work % tiles;  // tiles with the most steps first
    x.head = rest % p.heads;
    x.batch = rest / p.heads;
    x.exists = x.batch < p.batches;
    x.first = x.whole_first = 0;
    x.end = x.whole_end = p.length;
#ifdef CAUSAL
    if (KEYS)
        x.first = x.tile * S::TILE, x.whole_first = x.first + S::TILE;
    else
        x.whole_end = x.tile * S::TILE, x.end = x.whole_end + S::TILE;
#endif
#ifdef DOCUMENTS
    if (!x.exists) return x;
    const int *bounds = p.bounds + ((i64)x.batch * tiles + x.tile) * 4;
    x.first = max(x.first, bounds[0]), x.whole_first = max(x.whole_first, bounds[1]);
    x.whole_end = min(x.whole_end, bounds[2]), x.end = min(x.end, bounds[3]);
#endif
    return x;
}

// The loading warp. `own`: the tensors of the tile's rows; `other`: those of the other side.
template <class S, bool KEYS>
DEVICE void load_all(Shared<S> &shared, const Problem &p, const TensorMap *const *own, const TensorMap *const *other) {
    u32 count = 0;
    for (u32 n = 0;; ++n) {
        Place x = place_of<S, KEYS>(p, atomicAdd(p.counter, 1));
        u32 buffer = n % S::BUFFERS;
        u64 *full = &shared.tile_full[buffer];
        wait(&shared.tile_empty[buffer], (n / S::BUFFERS & 1) ^ 1);
        shared.place[buffer] = x;
        if (!x.exists) return arrive(full);
        expect(full, S::SIDES * S::GROUPS * HALVES * STEP_BYTES);
#pragma unroll
        for (int side = 0; side < S::SIDES; ++side)
            for (int i = 0; i < S::GROUPS; ++i)
                load(shared.tile[buffer][side][i], own[side], x.head, x.tile * S::TILE + i * STEP, x.batch, full);
#pragma unroll 1
        for (int row = x.first; row < x.end; row += STEP, ++count) {
            u32 stage = count % S::STAGES;
            full = &shared.full[stage];
            wait(&shared.empty[stage], (count / S::STAGES & 1) ^ 1);
            expect(full, 2 * HALVES * STEP_BYTES + (KEYS ? STEP * 16 : 0));
            load(shared.step[stage][0], other[0], x.head, row, x.batch, full);
            load(shared.step[stage][1], other[1], x.head, row, x.batch, full);
            if (KEYS)
                load_flat(shared.stats[stage], p.stats + ((i64)x.batch * p.heads + x.head) * p.length + row, STEP * 16,
                          full);
        }
    }
}

struct Thread {
    int group, warp, lane;
    int row, column;  // the thread's first row and column of 64 x 64 scores; it has i / 4 * 8 + i % 2 more columns, and
                      // i / 2 % 2 * 8 more rows, for i = 0, ..., 31
};

DEVICE Thread this_thread() {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // tells the compiler that the lanes have the same value
    return {group, warp, lane, warp * 16 + lane / 4, lane % 4 * 2};
}

// The steps of a tile, for one computing warpgroup.
template <class S, bool KEYS> struct Steps {
    Shared<S> &shared;
    const Problem &p;
    Thread me;
    u32 number = 0, count = 0;  // of tiles, and of steps
    u32 buffer, stage, pending;
    int row;  // the warpgroup's first row
    bool waiting;
    Place x;

    // Go to the next tile. Returns false after the last one.
    MEMBER bool next_tile() {
        buffer = number % S::BUFFERS;
        wait(&shared.tile_full[buffer], number / S::BUFFERS & 1);
        x = shared.place[buffer];
        row = x.tile * S::TILE + me.group * STEP;
        waiting = false;
        ++number;
        return x.exists;
    }

    // Wait for the step that begins at `start`. Returns false if the warpgroup's rows see none of it.
    MEMBER bool ready(int start) {
        stage = count++ % S::STAGES;
        wait(&shared.full[stage], (count - 1) / S::STAGES & 1);
#ifdef CAUSAL
        if (KEYS ? start + STEP <= row : start >= row + STEP) {
            release(&shared.empty[stage], me.lane);
            return false;
        }
#endif
        return true;
    }

    // The products of the previous step are done, so its rows can be overwritten.
    MEMBER void release_previous() {
        if (waiting) release(&shared.empty[pending], me.lane);
        waiting = true, pending = stage;
    }

    MEMBER bool whole(int start) {
#ifdef CAUSAL
        if (KEYS ? start < row + STEP : start + STEP > row) return false;
#endif
#ifdef DOCUMENTS
        return start >= x.whole_first && start < x.whole_end;
#endif
        return true;
    }

    MEMBER u32 own(int side) { return matrix(shared.tile[buffer][side][me.group]); }
    MEMBER u32 other(int side) { return matrix(shared.step[stage][side]); }

    // Start the scores, and the gradients of weights, as two groups of products.
    MEMBER void multiply_both(float (&s)[32], float (&g)[32]) {
        fence();
        multiply_rows(s, own(0), other(0));
        commit();
        multiply_rows(g, own(1), other(1));
        commit();
    }

    // Set the scores of invisible pairs to -inf.
    MEMBER void hide(float (&s)[32], int start) {
        int first = row + me.row, column = start + me.column;
#ifdef CAUSAL
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            int r = first + i / 2 % 2 * 8, c = column + i / 4 * 8 + i % 2;
            if (KEYS ? c < r : c > r) s[i] = -INFINITY;
        }
#endif
#ifdef DOCUMENTS
        const i64 *documents = p.documents + x.batch * p.documents_stride;
        i64 upper = documents[first], lower = documents[first + 8];
#pragma unroll
        for (int i = 0; i < 32; i += 4) {
            i64 left = documents[column + i * 2], right = documents[column + i * 2 + 1];
            if (left != upper) s[i] = -INFINITY;
            if (right != upper) s[i + 1] = -INFINITY;
            if (left != lower) s[i + 2] = -INFINITY;
            if (right != lower) s[i + 3] = -INFINITY;
        }
#endif
    }

    // Store the rows of a result, through the shared memory of the warpgroup's rows, which no product reads any more.
    MEMBER void store(const Strided &to, int side, const float (&d)[HALVES][32], float upper, float lower) {
        u16 *at = to.at + x.batch * to.batch + x.head * to.head + (i64)(row + me.warp * 16) * to.row;
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
            unsigned char *space = shared.tile[buffer][side][me.group][half] + me.warp * 16 * 128;
#pragma unroll
            for (int i = 0; i < 8; i += 2) {
                const float *from = d[half] + 4 * i;
                int r = me.lane % 16, chunk = i + me.lane / 16;
                asm volatile(
                    "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address(space) + r * 128 +
                                                                                             (chunk ^ r % 8) * 16),
                    "r"(packed(from[0] * upper, from[1] * upper)), "r"(packed(from[2] * lower, from[3] * lower)),
                    "r"(packed(from[4] * upper, from[5] * upper)), "r"(packed(from[6] * lower, from[7] * lower))
                    : "memory");
            }
            __syncwarp();
#pragma unroll
            for (int i = 0; i < 16; i += 4) {
                int r = i + me.lane / 8, chunk = me.lane % 8;
                *(uint4 *)(at + r * to.row + half * 64 + chunk * 8) =
                    *(uint4 *)(space + r * 128 + (chunk ^ r % 8) * 16);
            }
        }
    }

    // Before `store`: no warp of the warpgroup reads its rows any more.
    MEMBER void finish_tile() {
        finish<0>();
        if (waiting) release(&shared.empty[pending], me.lane);
        asm volatile("bar.sync %0, 128;" ::"r"(me.group + 1) : "memory");
    }

    MEMBER void release_tile() {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        release(&shared.tile_empty[buffer], me.lane);
    }
};

// Drop elements of rows of queries.
DEVICE void drop(float (&x)[32], const Problem &p, const Thread &me, int start, u64 upper, u64 lower) {
    u32 group = half_column(p, start) + me.column;
#pragma unroll
    for (int i = 0; i < 32; i += 8) {
#pragma unroll
        for (int j = i; j < i + 2; ++j) {
            u32 bits = draw((u32)upper, (u32)(upper >> 32), group + j);
            x[j] = bits << 16 >= p.threshold ? x[j] : 0.f;
            x[j + 4] = bits >= p.threshold ? x[j + 4] : 0.f;
            bits = draw((u32)lower, (u32)(lower >> 32), group + j);
            x[j + 2] = bits << 16 >= p.threshold ? x[j + 2] : 0.f;
            x[j + 6] = bits >= p.threshold ? x[j + 6] : 0.f;
        }
    }
}

// -- the kernels

DEVICE float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

template <class S> DEVICE void forward(Shared<S> &shared, const Problem &p) {
    Thread me = this_thread();
    Steps<S, false> steps{shared, p, me};
    while (steps.next_tile()) {
        const Place &x = steps.x;
        float total[HALVES][32] = {}, sums[2] = {}, largest[2] = {-INFINITY, -INFINITY};
        u32 weights[16] = {};
        u64 upper = 0, lower = 0;
#ifdef DROP
        const i64 *keys = p.keys + x.batch * p.keys_stride + steps.row + me.row;
        upper = row_key(keys[0], p.site, p.first_head + x.head);
        lower = row_key(keys[8], p.site, p.first_head + x.head);
#endif
        for (int start = x.first; start < x.end; start += STEP) {
            if (!steps.ready(start)) continue;
            float s[32];
            fence();
            multiply_rows(s, steps.own(0), steps.other(0));
            commit();
            finish<0>();
            settle(s), settle(weights), settle(total);
            steps.release_previous();
            if (!steps.whole(start)) steps.hide(s, start);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float most = -INFINITY, sum = 0;
#pragma unroll
                for (int i = 2 * half; i < 32; i += 4) most = fmaxf(most, fmaxf(s[i], s[i + 1]));
                most = fmaxf(largest[half], quad_max(most) * p.scale);
                // If a row has no visible keys so far, its maximum is -inf, and -inf minus -inf would be NaN.
                float base = most == -INFINITY ? 0.f : most, shrink = power(largest[half] - base);
                largest[half] = most;
#pragma unroll
                for (int i = 2 * half; i < 32; i += 4) {
#pragma unroll
                    for (int j = i; j < i + 2; ++j) {
                        s[j] = power(s[j] * p.scale - base);
                        sum += s[j];
#pragma unroll
                        for (int k = 0; k < HALVES; ++k) total[k][j] *= shrink;
                    }
                }
                sums[half] = sums[half] * shrink + sum;
            }
#ifdef DROP
            drop(s, p, me, start, upper, lower);
#endif
            pack(weights, s);
            fence();
            add_product(total, weights, steps.other(1));
            commit();
        }
        steps.finish_tile();
        settle(total), settle(weights);
        float shares[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float sum = quad_sum(sums[half]);
            shares[half] = p.first_scale / (sum > 0 ? sum : 1.f);
            if (me.lane % 4 == 0)
                p.lse[((i64)x.batch * p.heads + x.head) * p.length + steps.row + me.row + 8 * half] =
                    sum > 0 ? (largest[half] + log2f(sum)) * 0.6931471805599453f : -INFINITY;
        }
        steps.store(p.first, 0, total, shares[0], shares[1]);
        steps.release_tile();
    }
}

template <class S> DEVICE void backward_keys(Shared<S> &shared, const Problem &p) {
    Thread me = this_thread();
    Steps<S, true> steps{shared, p, me};
    while (steps.next_tile()) {
        const Place &x = steps.x;
        float grad_k[HALVES][32] = {}, grad_v[HALVES][32] = {};
        u32 weights[16] = {}, grads[16] = {};
        u32 group = half_column(p, steps.row) + me.warp * 8 + me.lane / 4;
        for (int start = x.first; start < x.end; start += STEP) {
            if (!steps.ready(start)) continue;
            float s[32], g[32];
            steps.multiply_both(s, g);
            finish<1>();
            settle(s), settle(weights), settle(grads), settle(grad_k), settle(grad_v);
            steps.release_previous();
            if (!steps.whole(start)) steps.hide(s, start);
            finish<0>();
            settle(g);
            const uint4 *stats = shared.stats[steps.stage] + me.column;
#pragma unroll
            for (int i = 0; i < 32; i += 4) {
#pragma unroll
                for (int j = i; j < i + 2; ++j) {
                    uint4 stat = stats[i * 2 + j - i];
                    float base = __uint_as_float(stat.x), delta = __uint_as_float(stat.y);
                    float upper = power(s[j] * p.scale - base), lower = power(s[j + 2] * p.scale - base);
                    s[j] = upper, s[j + 2] = lower;
#ifdef DROP
                    u32 bits = draw(stat.z, stat.w, group);
                    s[j] = bits << 16 >= p.threshold ? upper : 0.f;
                    s[j + 2] = bits >= p.threshold ? lower : 0.f;
#endif
                    g[j] = s[j] * g[j] - upper * delta;
                    g[j + 2] = s[j + 2] * g[j + 2] - lower * delta;
                }
                weights[i / 2] = packed(s[i], s[i + 1]), weights[i / 2 + 1] = packed(s[i + 2], s[i + 3]);
                grads[i / 2] = packed(g[i], g[i + 1]), grads[i / 2 + 1] = packed(g[i + 2], g[i + 3]);
            }
            fence();
            add_product(grad_v, weights, steps.other(1));
            add_product(grad_k, grads, steps.other(0));
            commit();
            if (HALVES == 2) {  // else registers would not suffice for the products of two steps
                finish<0>();
                settle(weights), settle(grads), settle(grad_k), settle(grad_v);
            }
        }
        steps.finish_tile();
        settle(grad_k), settle(grad_v), settle(weights), settle(grads);
        steps.store(p.first, 0, grad_k, p.first_scale, p.first_scale);
        steps.store(p.second, 1, grad_v, p.second_scale, p.second_scale);
        steps.release_tile();
    }
}

template <class S> DEVICE void backward_queries(Shared<S> &shared, const Problem &p) {
    Thread me = this_thread();
    Steps<S, false> steps{shared, p, me};
    while (steps.next_tile()) {
        const Place &x = steps.x;
        float grad_q[HALVES][32] = {};
        u32 grads[16] = {};
        const uint4 *stats = p.stats + ((i64)x.batch * p.heads + x.head) * p.length + steps.row + me.row;
        uint4 upper = stats[0], lower = stats[8];
        for (int start = x.first; start < x.end; start += STEP) {
            if (!steps.ready(start)) continue;
            float s[32], g[32];
            steps.multiply_both(s, g);
            finish<1>();
            settle(s), settle(grads), settle(grad_q);
            steps.release_previous();
            if (!steps.whole(start)) steps.hide(s, start);
            finish<0>();
            settle(g);
#ifdef DROP
            drop(g, p, me, start, (u64)upper.w << 32 | upper.z, (u64)lower.w << 32 | lower.z);
#endif
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                const uint4 &stat = i / 2 % 2 ? lower : upper;
                g[i] = power(s[i] * p.scale - __uint_as_float(stat.x)) * (g[i] - __uint_as_float(stat.y));
            }
            pack(grads, g);
            fence();
            add_product(grad_q, grads, steps.other(0));
            commit();
        }
        steps.finish_tile();
        settle(grad_q), settle(grads);
        steps.store(p.first, 0, grad_q, p.first_scale, p.first_scale);
        steps.release_tile();
    }
}

// -- entries

template <class S> DEVICE void prepare_barriers(Shared<S> &shared) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::BUFFERS; ++i) init(&shared.tile_full[i], 1), init(&shared.tile_empty[i], 4 * S::GROUPS);
        for (int i = 0; i < S::STAGES; ++i) init(&shared.full[i], 1), init(&shared.empty[i], 4 * S::GROUPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
}

// The computing warpgroups take the registers that the loading warpgroup does not need.
#define ENTRY(NAME, KEYS, SHAPE, REGISTERS)                                                                       \
    extern "C" __device__ const u32 attention_##NAME##_bytes = sizeof(Shared<SHAPE>);                             \
    extern "C" __global__ void __launch_bounds__(128 * (SHAPE::GROUPS + 1), 1)                                    \
        attention_##NAME(const __grid_constant__ TensorMap own, const __grid_constant__ TensorMap own_second,     \
                         const __grid_constant__ TensorMap other, const __grid_constant__ TensorMap other_second, \
                         const __grid_constant__ Problem problem) {                                               \
        extern __shared__ __align__(1024) unsigned char memory[];                                                 \
        Shared<SHAPE> &shared = *(Shared<SHAPE> *)memory;                                                         \
        prepare_barriers(shared);                                                                                 \
        if (threadIdx.x / 128 == SHAPE::GROUPS) {                                                                 \
            asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");                                                  \
            const TensorMap *owns[] = {&own, &own_second}, *others[] = {&other, &other_second};                   \
            if (threadIdx.x == SHAPE::GROUPS * 128) load_all<SHAPE, KEYS>(shared, problem, owns, others);         \
        } else {                                                                                                  \
            asm volatile("setmaxnreg.inc.sync.aligned.u32 " #REGISTERS ";");                                      \
            NAME(shared, problem);                                                                                \
        }                                                                                                         \
    }

#if WIDTH == 64
using Backward = Shape<2, 2, 2, 8>;
#else
using Backward = Shape<2, 2, 1, 4>;
#endif
#if FORWARD_GROUPS == 4
using Forward = Shape<4, 1, HALVES == 1 ? 2 : 1, HALVES == 1 ? 6 : 4>;
ENTRY(forward, false, Forward, 112)
#else
using Forward = Shape<2, 1, 2, HALVES == 1 ? 8 : 4>;
ENTRY(forward, false, Forward, 240)
#endif
ENTRY(backward_keys, true, Backward, 240)
ENTRY(backward_queries, false, Backward, 240)

// Compute `stats`. `first`: the output of attention; `second`: its gradient; `first_scale`: multiplies delta, the sum
// of their products. A row of 64 elements takes 8 threads.
extern "C" __global__ void attention_prepare(const __grid_constant__ Problem p) {
    constexpr int LANES = WIDTH / 8;
    i64 row = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / LANES;
    int lane = threadIdx.x % LANES;
    if (row >= (i64)p.batches * p.length * p.heads) return;
    int head = row % p.heads, query = row / p.heads % p.length;
    i64 batch = row / p.heads / p.length, at = (batch * p.heads + head) * p.length + query;
    uint4 parts[2];
    const Strided *views[] = {&p.first, &p.second};
#pragma unroll
    for (int i = 0; i < 2; ++i)
        parts[i] = *(const uint4 *)(views[i]->at + batch * views[i]->batch + query * views[i]->row +
                                    head * views[i]->head + lane * 8);
    const u32 *out = &parts[0].x, *grad = &parts[1].x;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        sum += unpacked(out[i]) * unpacked(grad[i]) + unpacked(out[i] >> 16) * unpacked(grad[i] >> 16);
#pragma unroll
    for (int i = 1; i < LANES; i *= 2) sum += __shfl_xor_sync(~0u, sum, i);
    if (lane) return;
    u64 key = 0;
#ifdef DROP
    key = row_key(p.keys[batch * p.keys_stride + query], p.site, p.first_head + head);
#endif
    p.stats[at] = make_uint4(__float_as_uint(p.lse[at] * 1.4426950408889634f), __float_as_uint(sum * p.first_scale),
                             (u32)key, (u32)(key >> 32));
}
