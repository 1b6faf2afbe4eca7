// Hashed attention on a CPU, in fp32.
//
// A token's code is G groups of `size` bits; a group's bits pick one of 2^size rows. scatter adds a token to the
// rows it picks, mix lets the rows of a group exchange what they hold, gather sums the rows a token picks, and
// flips says how that sum, times the token's own numbers, changes with each of its bits. A table has a row of
// `lanes` floats (D channels, filled up to whole vectors) for each value of each group, then a count for each.
//
// Threads take pieces of the batch's rows (a row is one head of one sample) by a counter. Where rows are cut into
// several pieces there are two passes, because a query reads what the keys of all pieces hold.
#include <math.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef float vec __attribute__((vector_size(64), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(64), aligned(4)));
enum { W = 16, TILE = 4, BLOCK = 4096, MAX_GROUPS = 64 };
#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define SHUFFLE(b, ...) __builtin_shufflevector(b, b, __VA_ARGS__)
#else
#define SHUFFLE(b, ...) __builtin_shuffle(b, (ivec){__VA_ARGS__})
#endif
#if defined(__x86_64__) && defined(__linux__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif
#define UNROLL _Pragma("GCC unroll 4")
#define SHAPE int groups, int size, int d
#define SAME groups, size, d
#define ROWS ((long)groups << size)
#define LANES ((d + W - 1) / W * W)
#define TABLE (ROWS * LANES + (ROWS + W - 1) / W * W)

// A call, as cpu.py fills it: eight bytes each, in this order. Strides are those of samples, heads and tokens.
typedef struct {
    int64_t task, heads, rows, nq, nk, bits, groups, size, d, heads_f, full, pieces, threads;
    const float *q, *k, *v, *f, *weight;
    const int64_t *packed_q, *packed_k;
    const float *state, *grad, *grad_own;
    float *out, *own, *below, *dq, *dk, *dv, *df, *dw, *dstate;
    int64_t sq[3], sk[3], sv[3], so[3], sg[3], sw[2];
    float *partial, *mixing;
    int64_t taken, done;
} Call;
enum { BACKWARD = 1, CAUSAL = 2 };
static const float FLOOR = 0x1p-30f;

// ---- Walks over tokens -------------------------------------------------------------------------------------

INLINE uint64_t code_of(const float *y, int bits) {
    uint64_t code = 0;
    int r = 0;
    for (; r + W <= bits; r += W) { // sixteen signs at a time
        static const ivec BIT = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
        ivec b = (*(const vec *)(y + r) >= 0) & BIT;
        b |= SHUFFLE(b, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
        b |= SHUFFLE(b, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3);
        b |= SHUFFLE(b, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1);
        code |= (uint64_t)(uint32_t)(b[0] | b[1]) << r;
    }
    for (; r < bits; r++) code |= (uint64_t)(y[r] >= 0) << r;
    return code;
}

// The codes of tokens, of which each is a row of numbers, or already a code.
INLINE void codes_of(const float *y, const int64_t *packed, long stride, long n, int bits, uint64_t *codes) {
    uint64_t mask = bits < 64 ? (1ull << bits) - 1 : ~0ull;
    if (packed)
        for (long i = 0; i < n; i++) codes[i] = (uint64_t)packed[i * stride] & mask;
    else if (bits == 16)
        for (long i = 0; i < n; i++) codes[i] = code_of(y + i * stride, 16);
    else
        for (long i = 0; i < n; i++) codes[i] = code_of(y + i * stride, bits);
}

INLINE long row_of(uint64_t code, int g, int size) {
    return ((long)g << size) + (long)(code >> g * size & ((1u << size) - 1));
}

INLINE void add_to(float *to, const float *y, float w, int d) {
    int c = 0;
    UNROLL
    for (; c + W <= d; c += W) *(vec *)(to + c) += w * *(const vec *)(y + c);
    for (; c < d; c++) to[c] += w * y[c];
}

// Each token's row y, times its weight, and its count, times its weight, to the rows its code picks.
INLINE void scatter(const uint64_t *codes, const float *y, long stride, const float *weight, const float *count, long n,
                    float *table, SHAPE) {
    float *counts = table + ROWS * LANES;
    for (long i = 0; i < n; i++, y += stride) {
        float w = weight ? weight[i] : 1;
        if (w == 0) continue;
        UNROLL
        for (int g = 0; g < groups; g++) {
            long row = row_of(codes[i], g, size);
            add_to(table + row * LANES, y, w, d);
            counts[row] += count ? w * count[i] : w;
        }
    }
}

// The sum of the rows that each token's code picks, divided by its count (at least `floor`), which goes to
// `below`; or, where that is NULL, times the token's weight.
INLINE void gather(const uint64_t *codes, const float *table, const float *weight, float floor, long n, float *out,
                   long stride, float *below, SHAPE) {
    const float *counts = table + ROWS * LANES;
    for (long i = 0; i < n; i++, out += stride) {
        const float *from[MAX_GROUPS];
        float total = 0, scale = weight ? weight[i] : 1;
        UNROLL
        for (int g = 0; g < groups; g++) {
            long row = row_of(codes[i], g, size);
            from[g] = table + row * LANES;
            total += counts[row];
        }
        if (below) { // NaN stays, zero means that no key was seen
            float bounded = total < floor ? floor : total;
            scale = floor == 0 ? 0 : 1 / bounded;
            below[i] = floor == 0 ? 0 : total < floor ? -floor : total;
        }
        int c = 0;
        UNROLL
        for (; c + W <= d; c += W) {
            vec sum = *(const vec *)(from[0] + c);
            UNROLL
            for (int g = 1; g < groups; g++) sum += *(const vec *)(from[g] + c);
            *(vec *)(out + c) = scale ? sum * scale : (vec){0};
        }
        for (; c < d; c++) {
            float sum = 0;
            for (int g = 0; g < groups; g++) sum += from[g][c];
            out[c] = scale ? sum * scale : 0;
        }
    }
}

// to = m from, group by group; or m transposed.
INLINE void mix(const float *m, int transposed, const float *from, float *to, SHAPE) {
    long values = 1l << size, step = transposed ? values : 1, rows = ROWS;
    for (int g = 0; g < groups; g++)
        for (long t = 0; t < values; t++) {
            const float *by = m + g * values * values + (transposed ? t : t * values),
                        *own = from + (g * values) * LANES;
            float *row = to + (g * values + t) * LANES, count = 0;
            for (int c = 0; c < LANES; c += W) {
                vec sum = {0};
                for (long u = 0; u < values; u++) sum += by[u * step] * *(const vec *)(own + u * LANES + c);
                *(vec *)(row + c) = sum;
            }
            for (long u = 0; u < values; u++) count += by[u * step] * from[rows * LANES + g * values + u];
            to[rows * LANES + g * values + t] = count;
        }
}

// Rows first to columns first: (D + 1) rows of ROWS numbers, the counts last.
INLINE void transpose(const float *table, float *to, SHAPE) {
    for (long r = 0; r < ROWS; r++)
        for (int c = 0; c < d; c++) to[c * ROWS + r] = table[r * LANES + c];
    memcpy(to + d * ROWS, table + ROWS * LANES, sizeof(float) * ROWS);
}

// p[i][r] = y_i . row r + count_i * count of row r, for `n` tokens (a constant) and rows from `first` to `last`.
INLINE void products(const float *y, long stride, const float *count, int n, const float *turned, long rows, long first,
                     long last, float *p, int d) {
    long r = first;
#define CHUNK(width)                                                                            \
    for (; r + width * W <= last; r += width * W) {                                             \
        vec sum[TILE][width];                                                                   \
        UNROLL                                                                                  \
        for (int i = 0; i < n; i++) UNROLL                                                      \
        for (int x = 0; x < width; x++)                                                         \
            sum[i][x] = (count ? count[i] : 1) * *(const vec *)(turned + d * rows + r + x * W); \
        for (int c = 0; c < d; c++) UNROLL                                                      \
        for (int i = 0; i < n; i++) UNROLL                                                      \
        for (int x = 0; x < width; x++)                                                         \
            sum[i][x] += y[i * stride + c] * *(const vec *)(turned + c * rows + r + x * W);     \
        UNROLL                                                                                  \
        for (int i = 0; i < n; i++) UNROLL                                                      \
        for (int x = 0; x < width; x++) *(vec *)(p + i * rows + r + x * W) = sum[i][x];         \
    }
    CHUNK(4)
    CHUNK(1)
    for (; r < last; r++)
        for (int i = 0; i < n; i++) {
            float sum = (count ? count[i] : 1) * turned[d * rows + r];
            for (int c = 0; c < d; c++) sum += y[i * stride + c] * turned[c * rows + r];
            p[i * rows + r] = sum;
        }
}

// The gradient of one token's numbers, from products with all rows; returns the sum of those its code picks.
INLINE float flips(uint64_t code, const float *y, float w, const float *p, float *grad, int add, int bits, int groups,
                   int size) {
    float total = 0, differ[MAX_GROUPS + 8];
    UNROLL
    for (int g = 0; g < groups; g++) {
        long row = row_of(code, g, size);
        total += p[row];
        UNROLL
        for (int r = 0; r < size; r++) differ[g * size + r] = p[row] - p[row ^ (1l << r)];
    }
    if (!grad) return total;
    int b = 0;
    for (; b + W <= bits; b += W) {
        vec x = *(const vec *)(y + b), half = 0.5f * w * *(const vec *)(differ + b);
        half = (vec)(((ivec)half ^ (~(x >= 0) & INT32_MIN)) & (x <= 1) & (x >= -1));
        *(vec *)(grad + b) = add ? *(const vec *)(grad + b) + half : half;
    }
    for (; b < bits; b++) {
        float half = (y[b] >= 0 ? 0.5f : -0.5f) * w * differ[b];
        half = fabsf(y[b]) <= 1 ? half : 0;
        grad[b] = add ? grad[b] + half : half;
    }
    return total;
}

// The gradients of the products below: dn = grad / below, and minus its product with the output for the count.
INLINE void numerators(const float *grad, const float *out, const float *below, long n, long sg, long so, float *dn,
                       float *dc, int d) {
    for (long i = 0; i < n; i++, grad += sg, out += so, dn += d) {
        float scale = below[i] ? 1 / fabsf(below[i]) : 0, sum = 0;
        vec part = {0};
        int c = 0;
        for (; c + W <= d; c += W) {
            vec x = *(const vec *)(grad + c) * scale;
            *(vec *)(dn + c) = x;
            part += x * *(const vec *)(out + c);
        }
        for (int x = 0; x < W; x++) sum += part[x];
        for (; c < d; c++) {
            dn[c] = grad[c] * scale;
            sum += dn[c] * out[c];
        }
        dc[i] = below[i] > 0 ? -sum : 0;
    }
}

// ---- One piece of one row of the batch ---------------------------------------------------------------------

enum { CHUNK_TOKENS = 256 };
typedef struct {
    const float *q, *k, *v, *weight, *grad, *state, *grad_own, *mixing;
    const int64_t *packed_q, *packed_k;
    float *out, *own, *below, *dq, *dk, *dv, *df, *dw, *dstate, *partial;
    float floor; // the smallest denominator a unit of weight
    int shared;
} Row;

#define AT(base, stride) (c->base ? c->base + sample * c->stride[0] + head * c->stride[1] : NULL)
#define OWN(base, numbers) (c->base ? c->base + row * (numbers) : NULL)
INLINE Row row_at(const Call *c, long row, SHAPE) {
    long sample = row / c->heads, head = row % c->heads, f = c->heads_f == 1 ? 0 : head,
         square = (long)groups << 2 * size;
    const float *mixing = c->mixing + f * (square + 1);
    Row r = {
        .q = AT(q, sq),
        .k = AT(k, sk),
        .v = AT(v, sv),
        .grad = AT(grad, sg),
        .out = AT(out, so),
        .packed_q = AT(packed_q, sq),
        .packed_k = AT(packed_k, sk),
        .weight = AT(weight, sw),
        .state = OWN(state, ROWS * (d + 1)),
        .grad_own = OWN(grad_own, ROWS * (d + 1)),
        .own = OWN(own, ROWS * (d + 1)),
        .dstate = OWN(dstate, ROWS * (d + 1)),
        .below = OWN(below, c->nq),
        .dq = OWN(dq, c->nq * c->bits),
        .dk = OWN(dk, c->nk * c->bits),
        .dv = OWN(dv, c->nk * d),
        .dw = OWN(dw, c->nk),
        .df = OWN(df, c->pieces * square),
        .partial = OWN(partial, 2 * c->pieces * TABLE),
        .mixing = mixing + 1,
        .floor = *mixing,
        .shared = !c->k && !c->packed_k,
    };
    return r;
}

INLINE void keys_codes(const Call *c, const Row *r, long at, long n, uint64_t *codes) {
    if (r->shared)
        codes_of(r->q ? r->q + at * c->sq[2] : 0, r->packed_q ? r->packed_q + at * c->sq[2] : 0, c->sq[2], n, c->bits,
                 codes);
    else
        codes_of(r->k ? r->k + at * c->sk[2] : 0, r->packed_k ? r->packed_k + at * c->sk[2] : 0, c->sk[2], n, c->bits,
                 codes);
}

INLINE void query_codes(const Call *c, const Row *r, long at, long n, uint64_t *codes) {
    codes_of(r->q ? r->q + at * c->sq[2] : 0, r->packed_q ? r->packed_q + at * c->sq[2] : 0, c->sq[2], n, c->bits,
             codes);
}

INLINE void add_table(float *to, const float *from, SHAPE) {
    for (long i = 0; i < TABLE; i += W) *(vec *)(to + i) += *(const vec *)(from + i);
}

// Between tables and states, which are rows of D channels and a count.
INLINE void add_state(float *table, const float *state, SHAPE) {
    for (long x = 0; x < ROWS; x++, state += d + 1) {
        add_to(table + x * LANES, state, 1, d);
        table[ROWS * LANES + x] += state[d];
    }
}

INLINE void store_state(const float *table, float *state, SHAPE) {
    for (long x = 0; x < ROWS; x++, state += d + 1) {
        memcpy(state, table + x * LANES, sizeof(float) * d);
        state[d] = table[ROWS * LANES + x];
    }
}

// What the keys from `first` to `last` hold; sums longer than a block are sums of blocks.
INLINE void hold(const Call *c, const Row *r, long first, long last, float *table, float *block, SHAPE) {
    uint64_t codes[CHUNK_TOKENS];
    memset(table, 0, sizeof(float) * TABLE);
    for (long from = first; from < last; from += BLOCK) {
        long end = from + BLOCK < last ? from + BLOCK : last;
        float *to = from == first ? table : block;
        if (to == block) memset(block, 0, sizeof(float) * TABLE);
        for (long at = from; at < end; at += CHUNK_TOKENS) {
            long n = end - at < CHUNK_TOKENS ? end - at : CHUNK_TOKENS;
            keys_codes(c, r, at, n, codes);
            scatter(codes, r->v + at * c->sv[2], c->sv[2], r->weight ? r->weight + at : 0, 0, n, to, SAME);
        }
        if (to == block) add_table(table, block, SAME);
    }
}

INLINE float seen_by(const float *table, SHAPE) {
    float seen = 0;
    for (long u = 0; u < 1l << size; u++) seen += table[ROWS * LANES + u];
    return seen;
}

// The sum of the partial tables of pieces from `first` to `last`; kind 0 is of keys, 1 of queries' gradients.
INLINE void gathered(const Call *c, const Row *r, int kind, long first, long last, float *table, SHAPE) {
    memset(table, 0, sizeof(float) * TABLE);
    for (long x = first; x < last; x++) add_table(table, r->partial + (kind * c->pieces + x) * TABLE, SAME);
}

INLINE void forward(const Call *c, int pass, const Row *r, long piece, long firsts[2], long lasts[2], float *scratch,
                    SHAPE) {
    float *table = scratch, *mixed = scratch + TABLE, *partial = r->partial + piece * TABLE;
    uint64_t codes[CHUNK_TOKENS];
    if (pass == 0) {
        hold(c, r, firsts[1], lasts[1], c->pieces > 1 ? partial : table, mixed, SAME);
        if (c->pieces > 1) return;
    }
    if (c->pieces > 1) gathered(c, r, 0, 0, c->pieces, table, SAME);
    if (piece == 0) store_state(table, r->own, SAME);
    if (r->state) add_state(table, r->state, SAME);
    float floor = r->floor * seen_by(table, SAME);
    mix(r->mixing, 0, table, mixed, SAME);
    for (long at = firsts[0]; at < lasts[0]; at += CHUNK_TOKENS) {
        long n = lasts[0] - at < CHUNK_TOKENS ? lasts[0] - at : CHUNK_TOKENS;
        query_codes(c, r, at, n, codes);
        gather(codes, mixed, 0, floor, n, r->out + at * c->so[2], c->so[2], r->below + at, SAME);
    }
}

INLINE void backward(const Call *c, int pass, const Row *r, long piece, long firsts[2], long lasts[2], float *scratch,
                     SHAPE) {
    float *table = scratch, *mixed = table + TABLE, *turned = mixed + TABLE, *p = turned + (d + 1) * ROWS;
    float *dn = p + TILE * ROWS, dc[CHUNK_TOKENS], *partial = r->partial + (c->pieces + piece) * TABLE;
    uint64_t codes[CHUNK_TOKENS];
    if (pass == 0) {
        memset(table, 0, sizeof(float) * TABLE);
        add_state(table, r->own, SAME);
        if (r->state) add_state(table, r->state, SAME);
        mix(r->mixing, 0, table, mixed, SAME);
        transpose(mixed, turned, SAME);
        memset(partial, 0, sizeof(float) * TABLE);
        float *block = table;
        memset(block, 0, sizeof(float) * TABLE);
        for (long at = firsts[0]; at < lasts[0]; at += CHUNK_TOKENS) {
            long n = lasts[0] - at < CHUNK_TOKENS ? lasts[0] - at : CHUNK_TOKENS;
            query_codes(c, r, at, n, codes);
            numerators(r->grad + at * c->sg[2], r->out + at * c->so[2], r->below + at, n, c->sg[2], c->so[2], dn, dc,
                       d);
            scatter(codes, dn, d, 0, dc, n, block, SAME);
            for (long i = 0; r->dq && i < n; i += TILE) {
                if (n - i >= TILE)
                    products(dn + i * d, d, dc + i, TILE, turned, ROWS, 0, ROWS, p, d);
                else
                    for (long x = 0; x < n - i; x++)
                        products(dn + (i + x) * d, d, dc + i + x, 1, turned, ROWS, 0, ROWS, p + x * ROWS, d);
                for (long x = 0; x < TILE && i + x < n; x++)
                    flips(codes[i + x], r->q + (at + i + x) * c->sq[2], 1, p + x * ROWS, r->dq + (at + i + x) * c->bits,
                          0, c->bits, groups, size);
            }
            if ((at - firsts[0]) / BLOCK != (at + n - firsts[0]) / BLOCK || at + n == lasts[0]) {
                add_table(partial, block, SAME);
                memset(block, 0, sizeof(float) * TABLE);
            }
        }
        if (c->pieces > 1) return;
    }
    gathered(c, r, 1, 0, c->pieces, table, SAME);
    if (piece == 0 && r->df) { // products of the state with the queries' sums, for each pair of a group's values
        memset(mixed, 0, sizeof(float) * TABLE);
        add_state(mixed, r->own, SAME);
        if (r->state) add_state(mixed, r->state, SAME);
        transpose(mixed, turned, SAME);
        for (int g = 0; g < groups; g++)
            for (long t = g << size; t < (g + 1l) << size; t++) {
                products(table + t * LANES, LANES, table + ROWS * LANES + t, 1, turned, ROWS, g << size,
                         (g + 1l) << size, p, d);
                memcpy(r->df + (t << size), p + (g << size), sizeof(float) << size);
            }
    }
    mix(r->mixing, 1, table, mixed, SAME);
    if (piece == 0 && r->dstate) store_state(mixed, r->dstate, SAME);
    if (r->grad_own) add_state(mixed, r->grad_own, SAME);
    transpose(mixed, turned, SAME);
    float *grad = r->shared ? r->dq : r->dk;
    const float *y = r->shared ? r->q : r->k;
    long stride = r->shared ? c->sq[2] : c->sk[2];
    for (long at = firsts[1]; at < lasts[1]; at += CHUNK_TOKENS) {
        long n = lasts[1] - at < CHUNK_TOKENS ? lasts[1] - at : CHUNK_TOKENS;
        const float *w = r->weight ? r->weight + at : 0, *v = r->v + at * c->sv[2];
        keys_codes(c, r, at, n, codes);
        gather(codes, mixed, w, 0, n, r->dv + at * d, d, 0, SAME);
        for (long i = 0; (grad || r->dw) && i < n; i += TILE) {
            if (n - i >= TILE)
                products(v + i * c->sv[2], c->sv[2], 0, TILE, turned, ROWS, 0, ROWS, p, d);
            else
                for (long x = 0; x < n - i; x++)
                    products(v + (i + x) * c->sv[2], c->sv[2], 0, 1, turned, ROWS, 0, ROWS, p + x * ROWS, d);
            for (long x = 0; x < TILE && i + x < n; x++) {
                long token = at + i + x;
                float weight = w ? w[i + x] : 1;
                if (weight == 0) memset(p + x * ROWS, 0, sizeof(float) * ROWS); // it may be NaN
                float total = flips(codes[i + x], y + token * stride, weight, p + x * ROWS,
                                    grad ? grad + token * c->bits : 0, r->shared, c->bits, groups, size);
                if (r->dw) r->dw[token] = total;
            }
        }
    }
}

// ---- Causal order: tokens one by one, on top of what the pieces before them hold ---------------------------

enum { SPAN = 512 };

// What a token reads: the mixed sums before its span, and the rows of its span as its code weighs them.
INLINE float read_running(uint64_t code, const float *m, int transposed, const float *before, const float *block,
                          float *sum, SHAPE) {
    long values = 1l << size;
    float count = 0;
    for (int g = 0; g < groups; g++) count += before[ROWS * LANES + row_of(code, g, size)];
    float by[1 << 8];
    vec counts = {0};
    for (int c = 0; c < LANES; c += W) *(vec *)(sum + c) = (vec){0};
    for (int g = 0; g < groups; g++) {
        long row = row_of(code, g, size), t = row - ((long)g << size);
        const float *square = m + g * values * values, *own = block + (g * values) * LANES,
                    *ones = block + ROWS * LANES + g * values;
        for (long u = 0; u < values; u++) by[u] = transposed ? square[u * values + t] : square[t * values + u];
        for (int c = 0; c < LANES; c += W) {
            vec x = *(vec *)(sum + c) + *(const vec *)(before + row * LANES + c);
            for (long u = 0; u < values; u++) x += by[u] * *(const vec *)(own + u * LANES + c);
            *(vec *)(sum + c) = x;
        }
        long u = 0;
        for (; u + W <= values; u += W) counts += *(const vec *)(by + u) * *(const vec *)(ones + u);
        for (; u < values; u++) count += by[u] * ones[u];
    }
    for (int x = 0; x < W; x++) count += counts[x];
    return count;
}

INLINE void causal(const Call *c, int pass, const Row *r, long piece, long first, long last, float *scratch, SHAPE) {
    float *base = scratch, *block = base + TABLE, *before = block + TABLE, *sum = before + TABLE, seen = 0;
    if (c->pieces > 1 && pass == 0) {
        hold(c, r, first, last, r->partial + piece * TABLE, block, SAME);
        return;
    }
    gathered(c, r, 0, 0, c->pieces > 1 ? piece : 0, base, SAME); // own keys only: the state is added to what is read
    if (c->pieces > 1 && piece == 0) {
        gathered(c, r, 0, 0, c->pieces, block, SAME);
        store_state(block, r->own, SAME);
    }
    for (long from = first; from < last; from += SPAN) {
        long n = last - from < SPAN ? last - from : SPAN;
        uint64_t codes[2][SPAN];
        query_codes(c, r, from, n, codes[0]);
        keys_codes(c, r, from, n, codes[1]);
        memcpy(block, base, sizeof(float) * TABLE);
        if (r->state) add_state(block, r->state, SAME);
        seen = seen_by(block, SAME);
        mix(r->mixing, 0, block, before, SAME);
        memset(block, 0, sizeof(float) * TABLE);
        for (long i = 0; i < n; i++) {
            const float *w = r->weight ? r->weight + from + i : 0;
            scatter(codes[1] + i, r->v + (from + i) * c->sv[2], 0, w, 0, 1, block, SAME);
            seen += w ? *w : 1;
            float count = read_running(codes[0][i], r->mixing, 0, before, block, sum, SAME), floor = r->floor * seen;
            float bounded = count < floor ? floor : count, scale = floor == 0 ? 0 : 1 / bounded;
            r->below[from + i] = floor == 0 ? 0 : count < floor ? -floor : count;
            float *out = r->out + (from + i) * c->so[2];
            for (int x = 0; x < d; x++) out[x] = scale ? sum[x] * scale : 0;
        }
        add_table(base, block, SAME);
    }
    if (c->pieces == 1) store_state(base, r->own, SAME);
}

// The products of one group with its square, added up: what mixed rows would have given.
INLINE void mix_products(const float *m, int transposed, const float *p, float *to, int groups, int size) {
    long values = 1l << size;
    for (int g = 0; g < groups; g++)
        for (long t = 0; t < values; t++) {
            float sum = 0;
            for (long u = 0; u < values; u++)
                sum += (transposed ? m[(g * values + u) * values + t] : m[(g * values + t) * values + u]) *
                       p[g * values + u];
            to[g * values + t] = sum;
        }
}

INLINE void add_turned(float *turned, uint64_t code, const float *y, float w, float count, SHAPE) {
    for (int g = 0; g < groups; g++) {
        float *to = turned + row_of(code, g, size);
        for (int x = 0; x < d; x++) to[x * ROWS] += w * y[x];
        to[d * ROWS] += w * count;
    }
}

INLINE void causal_backward(const Call *c, int pass, const Row *r, long piece, long first, long last, float *scratch,
                            SHAPE) {
    float *base = scratch, *block = base + TABLE, *before = block + TABLE, *turned = before + TABLE,
          *p = turned + (d + 1) * ROWS;
    float *q = p + ROWS, *given = q + ROWS, *sum = given + (d + 1) * ROWS, *dn = sum + LANES, dc[SPAN];
    uint64_t codes[2][SPAN];
    long square = (long)groups << 2 * size;
    if (c->pieces > 1 && pass == 0) {
        hold(c, r, first, last, r->partial + piece * TABLE, block, SAME);
        float *partial = r->partial + (c->pieces + piece) * TABLE;
        memset(partial, 0, sizeof(float) * TABLE);
        for (long from = first; from < last; from += SPAN) {
            long n = last - from < SPAN ? last - from : SPAN;
            query_codes(c, r, from, n, codes[0]);
            numerators(r->grad + from * c->sg[2], r->out + from * c->so[2], r->below + from, n, c->sg[2], c->so[2], dn,
                       dc, d);
            memset(block, 0, sizeof(float) * TABLE);
            scatter(codes[0], dn, d, 0, dc, n, block, SAME);
            add_table(partial, block, SAME);
        }
        return;
    }
    // Queries, from the first on: products with what the keys up to each of them hold.
    gathered(c, r, 0, 0, c->pieces > 1 ? piece : 0, base, SAME);
    if (r->state) add_state(base, r->state, SAME);
    if (r->df) memset(r->df + piece * square, 0, sizeof(float) * square);
    for (long from = first; from < last; from += SPAN) {
        long n = last - from < SPAN ? last - from : SPAN;
        query_codes(c, r, from, n, codes[0]);
        keys_codes(c, r, from, n, codes[1]);
        numerators(r->grad + from * c->sg[2], r->out + from * c->so[2], r->below + from, n, c->sg[2], c->so[2], dn, dc,
                   d);
        transpose(base, turned, SAME);
        memset(block, 0, sizeof(float) * TABLE);
        for (long i = 0; i < n; i++) {
            float w = r->weight ? r->weight[from + i] : 1;
            const float *v = r->v + (from + i) * c->sv[2];
            scatter(codes[1] + i, v, 0, &w, 0, 1, block, SAME);
            if (w != 0) add_turned(turned, codes[1][i], v, w, 1, SAME);
            products(dn + i * d, d, dc + i, 1, turned, ROWS, 0, ROWS, p, d);
            if (r->df)
                for (int g = 0; g < groups; g++) {
                    float *to = r->df + piece * square + (row_of(codes[0][i], g, size) << size);
                    for (long u = 0; u < 1l << size; u++) to[u] += p[(g << size) + u];
                }
            if (!r->dq) continue;
            mix_products(r->mixing, 0, p, q, groups, size);
            flips(codes[0][i], r->q + (from + i) * c->sq[2], 1, q, r->dq + (from + i) * c->bits, 0, c->bits, groups,
                  size);
        }
        add_table(base, block, SAME);
    }
    // Keys, from the last one back: products with what the queries from each of them on hold.
    float *grad = r->shared ? r->dq : r->dk;
    const float *y = r->shared ? r->q : r->k;
    long stride = r->shared ? c->sq[2] : c->sk[2], spans = (last - first + SPAN - 1) / SPAN;
    gathered(c, r, 1, piece + 1, c->pieces > 1 ? c->pieces : piece + 1, base, SAME);
    if (r->grad_own) {
        memset(block, 0, sizeof(float) * TABLE);
        add_state(block, r->grad_own, SAME);
        transpose(block, given, SAME);
    }
    for (long s = spans - 1; s >= 0; s--) {
        long from = first + s * SPAN, n = last - from < SPAN ? last - from : SPAN;
        query_codes(c, r, from, n, codes[0]);
        keys_codes(c, r, from, n, codes[1]);
        numerators(r->grad + from * c->sg[2], r->out + from * c->so[2], r->below + from, n, c->sg[2], c->so[2], dn, dc,
                   d);
        transpose(base, turned, SAME);
        mix(r->mixing, 1, base, before, SAME);
        if (r->grad_own) add_state(before, r->grad_own, SAME);
        memset(block, 0, sizeof(float) * TABLE);
        for (long i = n - 1; i >= 0; i--) {
            float w = r->weight ? r->weight[from + i] : 1;
            const float *v = r->v + (from + i) * c->sv[2];
            scatter(codes[0] + i, dn + i * d, 0, 0, dc + i, 1, block, SAME);
            add_turned(turned, codes[0][i], dn + i * d, 1, dc[i], SAME);
            read_running(codes[1][i], r->mixing, 1, before, block, sum, SAME);
            float *dv = r->dv + (from + i) * d;
            for (int x = 0; x < d; x++) dv[x] = w ? w * sum[x] : 0;
            if (!grad && !r->dw) continue;
            products(v, 0, 0, 1, turned, ROWS, 0, ROWS, p, d);
            mix_products(r->mixing, 1, p, q, groups, size);
            if (r->grad_own) {
                products(v, 0, 0, 1, given, ROWS, 0, ROWS, p, d);
                for (long x = 0; x < ROWS; x++) q[x] += p[x];
            }
            if (w == 0) memset(q, 0, sizeof(float) * ROWS); // it may be NaN
            float total = flips(codes[1][i], y + (from + i) * stride, w, q, grad ? grad + (from + i) * c->bits : 0,
                                r->shared, c->bits, groups, size);
            if (r->dw) r->dw[from + i] = total;
        }
        add_table(base, block, SAME);
    }
    if (piece == 0 && r->dstate) {
        mix(r->mixing, 1, base, before, SAME);
        store_state(before, r->dstate, SAME);
    }
}

// ---- Kernelised hash functions -----------------------------------------------------------------------------

// What cpu.py fills for hashing: y = (exp(-|x - s|^2 / (2 sigma)) - mean) A of tokens x of unit length.
typedef struct {
    int64_t heads, rows, n, d, samples, bits, threads;
    const float *x, *support, *mean, *sigma, *weight, *grad;
    float *y, *dx, *dweight;
    int64_t *codes, sx[3], taken;
    // Filled up to whole vectors, by head: the samples by channel and -|s|^2 / 2; the means; A, and a row of zeros.
    float *table, *means, *by;
} Hash;
enum { HASH_TOKENS = 512 };

// exp(x) for x <= 0: 2^n times a polynomial; below -87 it is zero, NaN stays NaN.
INLINE vec exponential(vec x) {
    vec scaled = x * 1.44269504f, whole = scaled + 12582912.0f; // rounds to the nearest whole number
    ivec power = ((ivec)whole - 0x4b400000) << 23;
    whole -= 12582912.0f;
    vec r = x - whole * 0.693359375f + whole * 2.12194440e-4f, p = 1.9875691500e-4f * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1;
    return (vec)(((ivec)p + power) & ~(x < -87));
}

// Features exp(...) - mean of `n` tokens, and what each token's length divides by.
INLINE void features(const float *x, long stride, int n, const float *table, const float *mean, float sigma, float *e,
                     float *unit, int support, int d) {
    static const float NONE[TILE] = {0};
    products(x, stride, NONE, n, table, support, 0, support, e, d);
    for (int i = 0; i < n; i++) {
        float square = 0;
        vec part = {0};
        int c = 0;
        for (; c + W <= d; c += W) part += *(const vec *)(x + i * stride + c) * *(const vec *)(x + i * stride + c);
        for (int k = 0; k < W; k++) square += part[k];
        for (; c < d; c++) square += x[i * stride + c] * x[i * stride + c];
        unit[i] = square == 0 ? 1 : square == INFINITY ? NAN : 1 / sqrtf(square);
        float own = square == 0 ? 0 : 0.5f;
        for (int m = 0; m < support; m += W) { // minus half of the squared distances, which are not negative
            vec near = *(vec *)(e + i * support + m) * unit[i] + *(const vec *)(table + d * support + m) - own;
            near = (vec)((ivec)near & ~(near > 0));
            *(vec *)(e + i * support + m) = exponential(near / sigma) - *(const vec *)(mean + m);
        }
    }
}

INLINE void hash_tokens(Hash *h, long row, long first, long last, int support, int d, int bits) {
    long sample = row / h->heads, head = row % h->heads;
    const float *x = h->x + sample * h->sx[0] + head * h->sx[1], *table = h->table + head * (d + 1) * support;
    const float *mean = h->means + head * support, *weight = h->by + head * (support + 1) * bits;
    float sigma = h->sigma[head], e[TILE * 256], y[TILE * 64], unit[TILE];
    for (long i = first; i < last; i += TILE) {
        int n = last - i < TILE ? (int)(last - i) : TILE;
        if (n == TILE) {
            features(x + i * h->sx[2], h->sx[2], TILE, table, mean, sigma, e, unit, support, d);
            products(e, support, 0, TILE, weight, bits, 0, bits, y, support);
        } else
            for (int t = 0; t < n; t++) {
                features(x + (i + t) * h->sx[2], h->sx[2], 1, table, mean, sigma, e, unit, support, d);
                products(e, support, 0, 1, weight, bits, 0, bits, y + t * bits, support);
            }
        for (int t = 0; t < n; t++) {
            if (h->codes)
                h->codes[row * h->n + i + t] = (int64_t)code_of(y + t * bits, (int)h->bits);
            else
                memcpy(h->y + (row * h->n + i + t) * h->bits, y + t * bits, sizeof(float) * h->bits);
        }
    }
}

// Gradients of the tokens, of which only what is orthogonal to each counts, and of A.
INLINE void hash_gradients(Hash *h, long row, float *dweight, int support, int d, int bits) {
    long sample = row / h->heads, head = row % h->heads;
    const float *x = h->x + sample * h->sx[0] + head * h->sx[1], *table = h->table + head * (d + 1) * support;
    const float *mean = h->means + head * support, *weight = h->by + head * (support + 1) * bits;
    float sigma = h->sigma[head], e[256], unit[1];
    for (long i = 0; i < h->n; i++) {
        const float *own = x + i * h->sx[2], *grad = h->grad + (row * h->n + i) * h->bits;
        float *dx = h->dx + (row * h->n + i) * d, along = 0;
        features(own, 0, 1, table, mean, sigma, e, unit, support, d);
        for (int m = 0; m < support; m++) {
            float sum = 0;
            for (int b = 0; b < h->bits; b++) sum += grad[b] * weight[m * bits + b];
            for (int b = 0; m < h->samples && b < h->bits; b++) dweight[m * h->bits + b] += e[m] * grad[b];
            e[m] = sum * (e[m] + mean[m]) / sigma;
        }
        for (int c = 0; c < d; c++) {
            float sum = 0;
            for (int m = 0; m < support; m++) sum += e[m] * table[c * support + m];
            dx[c] = sum;
            along += sum * own[c];
        }
        along *= unit[0] * unit[0];
        for (int c = 0; c < d; c++) dx[c] = unit[0] * (dx[c] - along * own[c]);
    }
}

// ---- Threads -----------------------------------------------------------------------------------------------

INLINE void work(Call *c, int every, float *scratch, SHAPE) {
    long items = c->rows * c->pieces, passes = c->pieces > 1 ? 2 : 1;
    for (;;) {
        long item = __atomic_fetch_add(&c->taken, 1, __ATOMIC_RELAXED);
        if (item >= passes * items) return;
        int pass = item >= items;
        // Whoever holds an item of the first pass is at work on it, or would be if it had a core.
        for (long turn = 0; pass && __atomic_load_n(&c->done, __ATOMIC_ACQUIRE) < items; turn++)
            if (turn > BLOCK) sched_yield();
        long row = item % items / c->pieces, piece = item % c->pieces;
        long first[2] = {c->nq * piece / c->pieces, c->nk * piece / c->pieces};
        long last[2] = {c->nq * (piece + 1) / c->pieces, c->nk * (piece + 1) / c->pieces};
        Row r = row_at(c, row, SAME);
        if (every && c->task == (CAUSAL | BACKWARD))
            causal_backward(c, pass, &r, piece, first[1], last[1], scratch, SAME);
        else if (c->task == CAUSAL)
            causal(c, pass, &r, piece, first[1], last[1], scratch, SAME);
        else if (c->task == BACKWARD)
            backward(c, pass, &r, piece, first, last, scratch, SAME);
        else
            forward(c, pass, &r, piece, first, last, scratch, SAME);
        __atomic_fetch_add(&c->done, 1, __ATOMIC_RELEASE);
    }
}

CLONES void ecoformer_work(void *data) {
    Call *c = data;
    int groups = (int)c->groups, size = (int)c->size, d = (int)c->d;
    size_t floats = 3 * TABLE + 2 * (d + 1) * ROWS + (TILE + 2) * ROWS + LANES + (size_t)SPAN * d;
    float *scratch = aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64);
    // Fewer copies compile sooner: the last task gains little from a constant d.
    int common = groups == 4 && size == 4;
    if (common && d == 32 && c->task != (CAUSAL | BACKWARD))
        work(c, 0, scratch, 4, 4, 32);
    else if (common)
        work(c, 1, scratch, 4, 4, d);
    else
        work(c, 1, scratch, SAME);
    free(scratch);
}

typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);

// Returns 1, and does nothing, if the affinity is negative for some codes.
int ecoformer_run(Call *c, Parallel parallel) {
    int groups = (int)c->groups, size = (int)c->size, d = (int)c->d;
    long values = 1l << size, last = c->bits - (groups - 1) * size, square = (long)groups << 2 * size;
    (void)d;
    for (long h = 0; h < c->heads_f; h++) {
        float *m = c->mixing + h * (square + 1), least = 0, mean = 0, *to = m + 1;
        const float *f = c->f + h * (c->full ? square : groups * (size + 1));
        for (int g = 0; g < groups; g++) {
            long reach = g == groups - 1 ? 1l << last : values;
            float smallest = INFINITY, sum = 0;
            for (long t = 0; t < values; t++)
                for (long u = 0; u < values; u++, to++) {
                    float x =
                        c->full ? f[(g * values + t) * values + u] : f[g * (size + 1) + __builtin_popcountl(t ^ u)];
                    *to = t < reach && u < reach ? x : 0;
                    if (t < reach && u < reach && x < smallest) smallest = x;
                    sum += *to;
                }
            least += smallest;
            mean += sum / (float)(values * values);
        }
        if (!(least >= 0)) return 1;
        *m = FLOOR * mean;
    }
    if (parallel && c->threads > 1)
        parallel(ecoformer_work, c, (unsigned)c->threads, 0);
    else
        ecoformer_work(c);
    return 0;
}

CLONES void ecoformer_hash_work(void *data) {
    Hash *h = data;
    long spans = h->grad ? 1 : (h->n + HASH_TOKENS - 1) / HASH_TOKENS;
    int support = (int)(h->samples + W - 1) / W * W, d = (int)h->d, bits = (int)(h->bits + W - 1) / W * W;
    for (;;) {
        long item = __atomic_fetch_add(&h->taken, 1, __ATOMIC_RELAXED), row = item / spans,
             first = item % spans * HASH_TOKENS;
        if (row >= h->rows) return;
        long last = first + HASH_TOKENS < h->n ? first + HASH_TOKENS : h->n;
        if (h->grad)
            hash_gradients(h, row, h->dweight + row * h->samples * h->bits, support, d, bits);
        else if (support == 32 && d == 32 && bits == 16)
            hash_tokens(h, row, first, last, 32, 32, 16);
        else if (support == 32 && d == 64 && bits == 16)
            hash_tokens(h, row, first, last, 32, 64, 16);
        else
            hash_tokens(h, row, first, last, support, d, bits);
    }
}

void ecoformer_hash(Hash *h, Parallel parallel) {
    if (!h->rows || !h->n) return;
    long d = h->d, wide = (h->samples + W - 1) / W * W, columns = (h->bits + W - 1) / W * W;
    long sizes[3] = {(d + 1) * wide, wide, (wide + 1) * columns};
    h->table = calloc(h->heads * (sizes[0] + sizes[1] + sizes[2]), sizeof(float));
    h->means = h->table + h->heads * sizes[0];
    h->by = h->means + h->heads * sizes[1];
    for (long head = 0; head < h->heads; head++)
        for (long m = 0; m < h->samples; m++) {
            const float *sample = h->support + (head * h->samples + m) * d;
            float *table = h->table + head * sizes[0] + m, square = 0;
            for (long c = 0; c < d; c++) {
                table[c * wide] = sample[c];
                square += sample[c] * sample[c];
            }
            table[d * wide] = -0.5f * square;
            h->means[head * wide + m] = h->mean[head * h->samples + m];
            memcpy(h->by + head * sizes[2] + m * columns, h->weight + (head * h->samples + m) * h->bits,
                   sizeof(float) * h->bits);
        }
    if (parallel && h->threads > 1)
        parallel(ecoformer_hash_work, h, (unsigned)h->threads, 0);
    else
        ecoformer_hash_work(h);
    free(h->table);
}
