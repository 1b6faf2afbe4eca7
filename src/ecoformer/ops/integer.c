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
typedef int16_t svec __attribute__((vector_size(32), aligned(1), may_alias));
enum { W = 16, PAIRS = 2 * W, CHUNK = 256, MANY = 1024, AHEAD = 24, MAX_GROUPS = 64 };
enum { WEIGHT_BITS = 24, LIMIT = 255 << 10 };
#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif
#if defined(__x86_64__) && defined(__linux__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif
#define SHAPE int groups, int size, int d
#define SAME groups, size, d
#define ROWS ((long)groups << size)
#define LANES ((long)(d + PAIRS - 1) / PAIRS * PAIRS)
#define TABLE (ROWS * LANES + (ROWS + W - 1) / W * W) // rows of channels, then the sum of weights of each

// A call, as integer.py fills it: eight bytes each, in this order. Strides are those of samples, heads and tokens.
typedef struct {
    int64_t threads, heads, rows, nq, nk, groups, size, d, q_bytes, k_bytes, pieces;
    const char *q, *k;
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

// `n` packed codes of `wide` bytes, the first one at number `at`.
INLINE void codes_of(const char *from, long at, long stride, long wide, long n, int bits, uint64_t *to) {
#define READ(type)            \
    if (wide == sizeof(type)) \
        for (long i = 0; i < n; i++) to[i] = ((const type *)from)[at + i * stride];
    READ(uint8_t)
    READ(uint16_t) READ(uint32_t) READ(uint64_t) for (long i = 0; i < n; i++) to[i] &=
        bits < 64 ? (1ull << bits) - 1 : ~0ull;
}

// ---- Keys --------------------------------------------------------------------------------------------------

// 2^24 for keys of exponent `top`, half of it for those of the next one, and so on; 0 where a key is padding.
INLINE void powers(const Call *c, long sample, long head, int top, long at, long n, int32_t *to) {
    const int8_t *e = c->exponent ? c->exponent + sample * c->se[0] + head * c->se[1] + at * c->se[2] : NULL;
    const uint8_t *mask = c->mask ? c->mask + sample * c->sm[0] + at * c->sm[1] : NULL;
    for (long i = 0; i < n; i++) to[i] = e ? e[i * c->se[2]] : top;
    for (long i = 0; i < n; i++) {
        int behind = to[i] < top ? top - to[i] : 0;
        to[i] = (1 << WEIGHT_BITS) >> (behind < 31 ? behind : 31);
    }
    for (long i = 0; mask && i < n; i++) to[i] = mask[i * c->sm[1]] ? 0 : to[i];
}

// The largest exponent of a row's keys, and how far powers are shifted so that they add up to at most 2^24.
INLINE void heaviest(const Call *c, long sample, long head, int *top, int *excess) {
    const int8_t *e = c->exponent + sample * c->se[0] + head * c->se[1];
    const uint8_t *mask = c->mask ? c->mask + sample * c->sm[0] : NULL;
    int most = INT8_MIN;
    int64_t total = 0;
    for (long i = 0; i < c->nk; i++) {
        int seen = mask && mask[i * c->sm[1]] ? INT8_MIN : e[i * c->se[2]];
        most = seen > most ? seen : most;
    }
    for (long at = 0; at < c->nk; at += CHUNK) {
        int32_t power[CHUNK];
        long n = c->nk - at < CHUNK ? c->nk - at : CHUNK;
        powers(c, sample, head, most, at, n, power);
        for (long i = 0; i < n; i++) total += power[i];
    }
    *top = most;
    for (*excess = 0; total > 1ll << (WEIGHT_BITS + *excess); ++*excess) {
    }
}

// Each value, times its key's weight, and the weight itself, to the rows that the key's code picks. Channels 2i of
// 32 ones come first, then 2i + 1: pairs of bytes become numbers where they are.
INLINE void scatter(const uint64_t *codes, const int8_t *v, long sv, const int32_t *weight, long n, int32_t *table,
                    SHAPE) {
    for (long i = 0; i < n; i++, v += sv) {
        __builtin_prefetch(v + AHEAD * sv);
        int32_t *rows[MAX_GROUPS];
        for (int g = 0; g < groups; g++) {
            long row = row_of(codes[i], g, size);
            rows[g] = table + row * LANES;
            table[ROWS * LANES + row] += weight[i];
        }
        for (int c = 0; c < d; c += PAIRS) {
            svec pairs = {0};
            if (d - c >= PAIRS)
                pairs = *(const svec *)(v + c);
            else
                memcpy(&pairs, v + c, d - c);
            ivec both = __builtin_convertvector(pairs, ivec), even = (both << 24 >> 24) * weight[i],
                 odd = (both >> 8) * weight[i];
            for (int g = 0; g < groups; g++) {
                *(ivec *)(rows[g] + c) += even;
                *(ivec *)(rows[g] + c + W) += odd;
            }
        }
    }
}

// The keys from `first` to `last` to an empty table.
INLINE void hold(const Call *c, long sample, long head, long first, long last, int bits, int32_t *table, SHAPE) {
    int top = 0, excess = WEIGHT_BITS; // all weigh 1
    if (c->exponent) heaviest(c, sample, head, &top, &excess);
    memset(table, 0, sizeof(int32_t) * TABLE);
    for (long at = first; at < last; at += CHUNK) {
        uint64_t codes[CHUNK];
        int32_t weight[CHUNK];
        long n = last - at < CHUNK ? last - at : CHUNK;
        powers(c, sample, head, top, at, n, weight);
        for (long i = 0; i < n; i++) weight[i] >>= excess;
        codes_of(c->k, sample * c->sk[0] + head * c->sk[1] + at * c->sk[2], c->sk[2], c->k_bytes, n, bits, codes);
        scatter(codes, c->v + sample * c->sv[0] + head * c->sv[1] + at * c->sv[2], c->sv[2], weight, n, table, SAME);
    }
}

// Rows of single groups from rows of pairs of groups.
INLINE void fold(const int32_t *pairs, int32_t *table, SHAPE) {
    long values = 1l << size, counts = ((groups + 1l) / 2 << 2 * size) * LANES;
    for (int g = 0; g < groups; g++)
        for (long t = 0; t < values; t++) {
            long from = ((long)(g / 2) << 2 * size) + (g % 2 ? t << size : t), step = g % 2 ? 1 : values;
            int32_t *to = table + (g * values + t) * LANES, count = 0;
            for (int c = 0; c < LANES; c += W) {
                ivec sum = {0};
                for (long u = 0; u < values; u++) sum += *(const ivec *)(pairs + (from + u * step) * LANES + c);
                *(ivec *)(to + c) = sum;
            }
            for (long u = 0; u < values; u++) count += pairs[counts + from + u * step];
            table[ROWS * LANES + g * values + t] = count;
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

// The sums that a query reads, times its reciprocal; see reference.integer_division.
INLINE void gather(const uint64_t *codes, const int64_t *table, const int32_t *multiplier, long n, int8_t *out, long so,
                   SHAPE) {
    const int e = multiplier[1];
    for (long i = 0; i < n; i++, out += so) {
        __builtin_prefetch(out + AHEAD * so, 1);
        const int64_t *rows[MAX_GROUPS];
        int64_t bottom = 0;
        for (int g = 0; g < groups; g++) {
            long row = row_of(codes[i], g, size);
            rows[g] = table + row * LANES;
            bottom += table[ROWS * LANES + row];
        }
        bottom |= !bottom;
        int length = 64 - __builtin_clzll((uint64_t)bottom), drop = length + e > 25 ? length + e - 25 : 0;
        int mantissa = (int)(length > 15 ? bottom >> (length - 15) : bottom << (15 - length));
        int reciprocal = (int)((unsigned)(multiplier[0] << 12) / (unsigned)mantissa);
        int shift = length + e - 3 - drop, half = 1 << (shift - 1);
        for (int c = 0; c < d; c += PAIRS) {
            int32_t part[PAIRS] __attribute__((aligned(64)));
            for (int odd = 0; odd < PAIRS; odd += W) {
                lvec low = *(const lvec *)(rows[0] + c + odd), high = *(const lvec *)(rows[0] + c + odd + W / 2);
                for (int g = 1; g < groups; g++) {
                    low += *(const lvec *)(rows[g] + c + odd);
                    high += *(const lvec *)(rows[g] + c + odd + W / 2);
                }
                low >>= drop, high >>= drop;
                *(ivec *)(part + odd) =
                    SHUFFLE((ivec)low, (ivec)high, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            }
            for (int x = 0; x < PAIRS; x++) {
                int y = part[x] < -LIMIT ? -LIMIT : part[x] > LIMIT ? LIMIT : part[x];
                y = (y * reciprocal + half) >> shift;
                part[x] = y < -127 ? -127 : y > 127 ? 127 : y;
            }
            svec pairs = __builtin_convertvector((*(ivec *)part & 255) | *(ivec *)(part + W) << 8, svec);
            if (d - c >= PAIRS)
                *(svec *)(out + c) = pairs;
            else
                memcpy(out + c, &pairs, d - c);
        }
    }
}

// ---- Threads -----------------------------------------------------------------------------------------------

#define BUCKETS ((((groups + 1l) / 2 << 2 * size) * (LANES + 1) + W - 1) / W * W)
INLINE void work(Call *c, int32_t *scratch, SHAPE) {
    int bits = groups * size < 64 ? groups * size : 64,
        joined = 2 * size <= 8 && groups > 1 && c->nk >= MANY * c->pieces;
    int32_t *table = scratch, *planes = table + TABLE, *buckets = planes + (size + 1) * (LANES << size);
    int64_t *mixed = (int64_t *)(buckets + (joined ? BUCKETS : 0));
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
            long first = c->nk * piece / c->pieces, last = c->nk * (piece + 1) / c->pieces;
            if (joined) {
                hold(c, sample, head, first, last, bits, buckets, (groups + 1) / 2, 2 * size, d);
                fold(buckets, to, SAME);
            } else
                hold(c, sample, head, first, last, bits, to, SAME);
        }
        if (pass == passes - 1) {
            if (passes == 2) memcpy(table, partial, sizeof(int32_t) * TABLE);
            for (long x = 1; x < c->pieces; x++)
                for (long i = 0; i < ROWS * (LANES + 1); i++) table[i] += partial[x * TABLE + i];
            for (int g = 0; g < groups; g++) {
                const int32_t *levels = c->levels + (head * groups + g) * (size + 1);
                long at = (long)g << size, count = ROWS * LANES + at;
                mix(levels, table + at * LANES, mixed + at * LANES, planes, LANES, size);
                mix(levels, table + count, mixed + count, planes, 1, size);
            }
            long first = c->nq * piece / c->pieces, last = c->nq * (piece + 1) / c->pieces;
            for (long at = first; at < last; at += CHUNK) {
                long n = last - at < CHUNK ? last - at : CHUNK;
                uint64_t codes[CHUNK];
                codes_of(c->q, sample * c->sq[0] + head * c->sq[1] + at * c->sq[2], c->sq[2], c->q_bytes, n, bits,
                         codes);
                gather(codes, mixed, c->multiplier + 2 * head, n,
                       c->out + sample * c->so[0] + head * c->so[1] + at * c->so[2], c->so[2], SAME);
            }
        }
        __atomic_fetch_add(&c->done, 1, __ATOMIC_RELEASE);
    }
}

CLONES void ecoformer_integer_work(void *data) {
    Call *c = data;
    int groups = (int)c->groups, size = (int)c->size, d = (int)c->d;
    size_t numbers = 3 * TABLE + (size + 1) * (LANES << size) + (2 * size <= 8 ? BUCKETS : 0);
    int32_t *scratch = aligned_alloc(64, (numbers * sizeof(int32_t) + 63) / 64 * 64);
    if (groups == 4 && size == 4 && d == 32)
        work(c, scratch, 4, 4, 32);
    else if (groups == 4 && size == 4 && d == 64)
        work(c, scratch, 4, 4, 64);
    else
        work(c, scratch, SAME);
    free(scratch);
}

// ---- Packing -----------------------------------------------------------------------------------------------

typedef struct {
    int64_t threads, rows, codes, bits, stride;
    const int32_t *sums, *least;
    void *out;
    int64_t taken;
} Packing;

INLINE uint64_t reached(const int32_t *x, const int32_t *least, int bits) {
    uint64_t code = 0;
    int r = 0;
    for (; r + W <= bits; r += W) { // sixteen bits at a time
        static const ivec BIT = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
        ivec b = (*(const ivec *)(x + r) >= *(const ivec *)(least + r)) & BIT;
        b |= SHUFFLE(b, b, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
        b |= SHUFFLE(b, b, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3);
        b |= SHUFFLE(b, b, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1);
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
        for (long i = first; i < first + CHUNK && i < p->rows; i++) {
            const int32_t *x = p->sums + i * p->stride, *least = p->least;
#define PACK(type, bits)                                                               \
    for (long j = i * p->codes; j < (i + 1) * p->codes; j++, x += bits, least += bits) \
        ((type *)p->out)[j] = (type)reached(x, least, bits);
            if (bits == 16)
                PACK(uint16_t, 16)
            else if (bits == 8)
                PACK(uint8_t, 8)
            else if (bits == 32)
                PACK(uint32_t, 32)
            else
                PACK(uint64_t, bits)
        }
    }
}

// ---- Calls -------------------------------------------------------------------------------------------------

typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);

void ecoformer_pack_signs(Packing *p, Parallel parallel) {
    if (parallel && p->threads > 1)
        parallel(ecoformer_pack_work, p, (unsigned)p->threads, 0);
    else
        ecoformer_pack_work(p);
}

// Returns 1, and does nothing, if levels or multipliers are out of bounds.
int ecoformer_integer_attention(Call *c, Parallel parallel) {
    const int32_t *level = c->levels, *m = c->multiplier;
    for (long h = 0; h < c->heads; h++, m += 2) {
        int64_t sum = 0;
        for (long g = 0; g < c->groups; g++) {
            int32_t most = 0, least = 0;
            for (long x = 0; x <= c->size; x++, level++) {
                most = *level > most ? *level : most;
                least = *level < least ? *level : least;
            }
            if (least < 0) return 1;
            sum += most;
        }
        if (sum > 1ll << 31 || m[0] < 1 << 14 || m[0] >= 1 << 15 || m[1] < 3 || m[1] > 22) return 1;
    }
    if (parallel && c->threads > 1)
        parallel(ecoformer_integer_work, c, (unsigned)c->threads, 0);
    else
        ecoformer_integer_work(c);
    return 0;
}
