// Hashed attention in whole numbers: packed codes and int8 values to int8 outputs, as reference.integer_attention.
//
// The rows are those of cpu.c: scatter adds int8 values times key weights, powers of two, to the rows that a key's
// code picks, in int32; mix weighs them by levels, in int64; gather sums what a query's code picks and divides.
// Sums over all keys of weights are at most 2^24, sums over all groups of levels at most 2^31, so no sum overflows,
// and in any order it is the same.
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int32_t ivec __attribute__((vector_size(64), aligned(4)));
typedef int64_t lvec __attribute__((vector_size(64), aligned(8)));
typedef int16_t svec __attribute__((vector_size(32), aligned(1)));
enum { W = 16, PAIRS = 2 * W, CHUNK = 256, MAX_GROUPS = 64, WEIGHT_BITS = 24, HIDDEN = -1024 };
#define INLINE static inline __attribute__((always_inline))
#if defined(__x86_64__) && defined(__linux__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif
#define SHAPE int groups, int size, int d
#define SAME groups, size, d
#define ROWS ((long)groups << size)
#define LANES ((d + PAIRS - 1) / PAIRS * PAIRS)
#define TABLE (ROWS * LANES + (ROWS + W - 1) / W * W) // rows of channels, then the sum of weights of each

// A call, as integer.py fills it: eight bytes each, in this order. Strides are those of samples, heads and tokens.
typedef struct {
    int64_t heads, rows, nq, nk, groups, size, d, pieces, threads;
    const int64_t *q, *k;
    const int8_t *v, *exponent;
    const uint8_t *mask;
    const int32_t *levels, *multiplier;
    int8_t *out;
    int32_t *partial;
    int64_t sq[3], sk[3], sv[3], so[3], se[3], sm[2], taken, done;
} Call;

INLINE long row_of(uint64_t code, int g, int size) {
    return ((long)g << size) + (long)(code >> g * size & ((1u << size) - 1));
}

// ---- Keys --------------------------------------------------------------------------------------------------

// Exponents of `n` keys, from `at` on; HIDDEN where a key is padding.
INLINE void exponents(const Call *c, long sample, long head, long at, long n, int16_t *to) {
    const int8_t *e = c->exponent + sample * c->se[0] + head * c->se[1] + at * c->se[2];
    for (long i = 0; i < n; i++) to[i] = e[i * c->se[2]];
    if (!c->mask) return;
    const uint8_t *mask = c->mask + sample * c->sm[0] + at * c->sm[1];
    for (long i = 0; i < n; i++) to[i] = mask[i * c->sm[1]] ? HIDDEN : to[i];
}

INLINE int power(int top, int exponent) {
    int by = top - exponent;
    return (1 << WEIGHT_BITS) >> (by < 31 ? by : 31);
}

// The largest exponent of a row's keys, and how far powers are shifted so that their sum is at most 2^24.
INLINE void heaviest(const Call *c, long sample, long head, int *top, int *excess) {
    int16_t e[CHUNK];
    int most = INT8_MIN;
    int64_t total = 0;
    for (int pass = 0; pass < 2; pass++)
        for (long at = 0; at < c->nk; at += CHUNK) {
            long n = c->nk - at < CHUNK ? c->nk - at : CHUNK;
            if (pass == 0 || n < c->nk) exponents(c, sample, head, at, n, e);
            if (pass == 0)
                for (long i = 0; i < n; i++) most = e[i] > most ? e[i] : most;
            else
                for (long i = 0; i < n; i++) total += power(most, e[i]);
        }
    *top = most;
    for (*excess = 0; total > 1ll << (WEIGHT_BITS + *excess); ++*excess) {}
}

// Each value, times its key's weight, and the weight itself, to the rows that the key's code picks.
INLINE void scatter(const int64_t *codes, long sk, const int8_t *v, long sv, const int32_t *weight, long n,
                    int32_t *table, SHAPE) {
    for (long i = 0; i < n; i++, v += sv) {
        int32_t *rows[MAX_GROUPS];
        for (int g = 0; g < groups; g++) {
            long row = row_of((uint64_t)codes[i * sk], g, size);
            rows[g] = table + row * LANES;
            table[ROWS * LANES + row] += weight[i];
        }
        for (int c = 0; c < d; c += PAIRS) {
            svec pairs = {0};
            if (d - c >= PAIRS) pairs = *(const svec *)(v + c);
            else memcpy(&pairs, v + c, d - c);
            ivec both = __builtin_convertvector(pairs, ivec), even = (both << 24 >> 24) * weight[i], odd = (both >> 8) * weight[i];
            for (int g = 0; g < groups; g++) {
                *(ivec *)(rows[g] + c) += even;
                *(ivec *)(rows[g] + c + W) += odd;
            }
        }
    }
}

// What the keys from `first` to `last` hold.
INLINE void hold(const Call *c, long sample, long head, long first, long last, int32_t *table, SHAPE) {
    int top = 0, excess = 0;
    if (c->exponent) heaviest(c, sample, head, &top, &excess);
    memset(table, 0, sizeof(int32_t) * TABLE);
    for (long at = first; at < last; at += CHUNK) {
        long n = last - at < CHUNK ? last - at : CHUNK;
        int32_t weight[CHUNK];
        int16_t e[CHUNK];
        if (c->exponent) exponents(c, sample, head, at, n, e);
        if (c->exponent)
            for (long i = 0; i < n; i++) weight[i] = power(top, e[i]) >> excess;
        else
            for (long i = 0; i < n; i++) weight[i] = !c->mask || !c->mask[sample * c->sm[0] + (at + i) * c->sm[1]];
        scatter(c->k + sample * c->sk[0] + head * c->sk[1] + at * c->sk[2], c->sk[2],
                c->v + sample * c->sv[0] + head * c->sv[1] + at * c->sv[2], c->sv[2], weight, n, table, SAME);
    }
}

// ---- What values of a group read ---------------------------------------------------------------------------

// A group's rows, of `wide` numbers each, weighed by its levels. Bit by bit, sums over the values at each distance
// come first, which are sums of different keys: those at distance d are d bits away in the bits seen so far.
INLINE void mix(const int32_t *levels, const int32_t *from, int64_t *to, int32_t *planes, long wide, int size) {
    long plane = wide << size;
    memcpy(planes, from, sizeof(int32_t) * plane);
    memset(planes + plane, 0, sizeof(int32_t) * plane * size);
    for (int r = 0; r < size; r++)
        for (int x = r + 1; x > 0; x--)
            for (long half = wide << r, at = 0; at < plane; at += 2 * half) {
                int32_t *here = planes + x * plane + at, *nearer = here - plane;
                for (long i = 0; i < half; i++) here[i] += nearer[i + half];
                for (long i = 0; i < half; i++) here[i + half] += nearer[i];
            }
    for (long i = 0; i < plane; i++) {
        int64_t sum = 0;
        for (int x = 0; x <= size; x++) sum += (int64_t)levels[x] * planes[x * plane + i];
        to[i] = sum;
    }
}

// ---- Queries -----------------------------------------------------------------------------------------------

// x, at most `most` and at least -most.
INLINE void cut(ivec *x, int most) {
    for (int i = 0; i < W; i++) (*x)[i] = (*x)[i] > most ? most : (*x)[i];
    for (int i = 0; i < W; i++) (*x)[i] = (*x)[i] < -most ? -most : (*x)[i];
}

// The sums that a query reads, times its reciprocal; see reference.integer_division.
INLINE void gather(const int64_t *codes, long sq, const int64_t *table, const int32_t *multiplier, long n, int8_t *out,
                   long so, SHAPE) {
    const int e = multiplier[1];
    for (long i = 0; i < n; i++, out += so) {
        const int64_t *rows[MAX_GROUPS];
        int64_t bottom = 0;
        for (int g = 0; g < groups; g++) {
            long row = row_of((uint64_t)codes[i * sq], g, size);
            rows[g] = table + row * LANES;
            bottom += table[ROWS * LANES + row];
        }
        bottom |= !bottom;
        int length = 64 - __builtin_clzll((uint64_t)bottom), drop = length + e > 25 ? length + e - 25 : 0;
        int mantissa = (int)(length > 15 ? bottom >> (length - 15) : bottom << (15 - length));
        int reciprocal = (multiplier[0] << 12) / mantissa, shift = length + e - 3 - drop, half = 1 << (shift - 1);
        for (int c = 0; c < d; c += PAIRS) {
            ivec found[2];
            for (int odd = 0; odd < 2; odd++) {
                lvec low = {0}, high = {0};
                for (int g = 0; g < groups; g++) {
                    low += *(const lvec *)(rows[g] + c + odd * W);
                    high += *(const lvec *)(rows[g] + c + odd * W + W / 2);
                }
                low >>= drop, high >>= drop;
                ivec x = __builtin_shuffle((ivec)low, (ivec)high, (ivec){0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30});
                cut(&x, 255 << 10);
                x = (x * reciprocal + half) >> shift;
                cut(&x, 127);
                found[odd] = x;
            }
            svec pairs = __builtin_convertvector((found[0] & 255) | found[1] << 8, svec);
            if (d - c >= PAIRS) *(svec *)(out + c) = pairs;
            else memcpy(out + c, &pairs, d - c);
        }
    }
}

// ---- Threads -----------------------------------------------------------------------------------------------

INLINE void work(Call *c, int32_t *scratch, SHAPE) {
    int32_t *table = scratch, *planes = table + TABLE;
    int64_t *mixed = (int64_t *)(planes + ((size + 1) * (LANES << size) + W - 1) / W * W);
    long items = c->rows * c->pieces, passes = c->pieces > 1 ? 2 : 1;
    for (;;) {
        long item = __atomic_fetch_add(&c->taken, 1, __ATOMIC_RELAXED);
        if (item >= passes * items) return;
        int pass = item >= items;
        // Whoever holds an item of the first pass is at work on it, or would be if it had a core.
        for (long turn = 0; pass && __atomic_load_n(&c->done, __ATOMIC_ACQUIRE) < items; turn++)
            if (turn > 4096) sched_yield();
        long row = item % items / c->pieces, piece = item % c->pieces, sample = row / c->heads, head = row % c->heads;
        int32_t *partial = c->partial + row * c->pieces * TABLE;
        if (pass == 0) {
            int32_t *to = passes == 1 ? table : partial + piece * TABLE;
            hold(c, sample, head, c->nk * piece / c->pieces, c->nk * (piece + 1) / c->pieces, to, SAME);
        }
        if (pass == passes - 1) {
            if (passes == 2) memcpy(table, partial, sizeof(int32_t) * TABLE);
            for (long x = 1; x < c->pieces; x++)
                for (long i = 0; i < TABLE; i++) table[i] += partial[x * TABLE + i];
            for (int g = 0; g < groups; g++) {
                const int32_t *levels = c->levels + (head * groups + g) * (size + 1);
                long at = (long)g << size, count = ROWS * LANES + at;
                mix(levels, table + at * LANES, mixed + at * LANES, planes, LANES, size);
                mix(levels, table + count, mixed + count, planes, 1, size);
            }
            long first = c->nq * piece / c->pieces, last = c->nq * (piece + 1) / c->pieces;
            gather(c->q + sample * c->sq[0] + head * c->sq[1] + first * c->sq[2], c->sq[2], mixed,
                   c->multiplier + 2 * head, last - first,
                   c->out + sample * c->so[0] + head * c->so[1] + first * c->so[2], c->so[2], SAME);
        }
        __atomic_fetch_add(&c->done, 1, __ATOMIC_RELEASE);
    }
}

CLONES void ecoformer_integer_work(void *data) {
    Call *c = data;
    int groups = (int)c->groups, size = (int)c->size, d = (int)c->d;
    size_t numbers = 3 * (size_t)TABLE + ((size_t)(size + 1) * LANES << size) + W;
    int32_t *scratch = aligned_alloc(64, (numbers * sizeof(int32_t) + 63) / 64 * 64);
    if (groups == 4 && size == 4 && d == 32) work(c, scratch, 4, 4, 32);
    else if (groups == 4 && size == 4 && d == 64) work(c, scratch, 4, 4, 64);
    else work(c, scratch, SAME);
    free(scratch);
}

// ---- Packing -----------------------------------------------------------------------------------------------

typedef struct {
    int64_t rows, codes, bits, stride, threads;
    const int32_t *sums, *least;
    int64_t *out, taken;
} Packing;

INLINE uint64_t reached(const int32_t *x, const int32_t *least, int bits) {
    uint64_t code = 0;
    int r = 0;
    for (; r + W <= bits; r += W) { // sixteen bits at a time
        static const ivec BIT = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
        ivec b = (*(const ivec *)(x + r) >= *(const ivec *)(least + r)) & BIT;
        b |= __builtin_shuffle(b, (ivec){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
        b |= __builtin_shuffle(b, (ivec){4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3});
        b |= __builtin_shuffle(b, (ivec){2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1});
        code |= (uint64_t)(uint32_t)(b[0] | b[1]) << r;
    }
    for (; r < bits; r++) code |= (uint64_t)(x[r] >= least[r]) << r;
    return code;
}

CLONES void ecoformer_pack_work(void *data) {
    Packing *p = data;
    int bits = (int)p->bits;
    for (;;) {
        long first = __atomic_fetch_add(&p->taken, CHUNK, __ATOMIC_RELAXED);
        if (first >= p->rows) return;
        for (long i = first; i < first + CHUNK && i < p->rows; i++)
            for (long j = 0; j < p->codes; j++)
                p->out[i * p->codes + j] = (int64_t)reached(p->sums + i * p->stride + j * bits, p->least + j * bits, bits);
    }
}

// ---- Calls -------------------------------------------------------------------------------------------------

typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);

void ecoformer_pack_signs(Packing *p, Parallel parallel) {
    if (parallel && p->threads > 1) parallel(ecoformer_pack_work, p, (unsigned)p->threads, 0);
    else ecoformer_pack_work(p);
}

// Returns 1, and does nothing, if levels or multipliers are not those of integer.py.
int ecoformer_integer_attention(Call *c, Parallel parallel) {
    for (long h = 0; h < c->heads; h++) {
        const int32_t *level = c->levels + h * c->groups * (c->size + 1), *m = c->multiplier + 2 * h;
        int64_t sum = 0;
        for (long g = 0; g < c->groups; g++) {
            int32_t most = 0;
            for (long x = 0; x <= c->size; x++, level++) {
                if (*level < 0) return 1;
                most = *level > most ? *level : most;
            }
            sum += most;
        }
        if (sum > 1ll << 31 || m[0] < 1 << 14 || m[0] >= 1 << 15 || m[1] < 3 || m[1] > 22) return 1;
    }
    if (parallel && c->threads > 1) parallel(ecoformer_integer_work, c, (unsigned)c->threads, 0);
    else ecoformer_integer_work(c);
    return 0;
}
