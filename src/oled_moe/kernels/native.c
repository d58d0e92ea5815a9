/* Products of few rows with bfloat16 or quantised weights, at the speed of memory.
 *
 * Weights [out, in], row-major or in panels (quantization.py), are read from memory once, whatever
 * the number of rows. Every output is one dot product in fp32 whose order of summation depends on
 * `in`, the form of the weights and the instruction set alone: neither the number of rows, nor
 * threads, nor how work was divided can change a bit.
 *
 * Work is cut into tasks, which threads take from one counter. The caller takes part; workers of a
 * small pool join as they wake up, so a call never waits for one that sleeps.
 *
 * Plain C11 with pthreads, loaded through ctypes (native.py), which checks shapes: here sizes are
 * positive and pointers to bfloat16 are even.
 *
 * Words: `k` is the length of a dot product, a *row* is a row of x, an *output* a row of weights.
 */

#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(_WIN32) || !(defined(__GNUC__) || defined(__clang__))
#error "needs pthreads and the vector extensions of gcc and clang; torch serves instead"
#endif

#if defined(__x86_64__)
#define HAS_X86 1
#include <immintrin.h>
#else
#define HAS_X86 0
#endif

/* Compilers from 2021 on know the instructions for bfloat16. */
#if !HAS_X86
#define HAS_AVX512_BF16 0
#elif defined(__clang__)
#define HAS_AVX512_BF16 (__clang_major__ >= 12)
#else
#define HAS_AVX512_BF16 (__GNUC__ >= 11)
#endif

/* Raised with every change of what native.py calls, or of what it expects of a call. */
#define ABI_VERSION 11
/* The first 8 bytes of the SHA-256 of this file, from setup.py: no old build is used by mistake. */
#ifndef SOURCE_ID
#define SOURCE_ID 0
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

enum { ISA_GENERIC = 0, ISA_AVX2 = 1, ISA_AVX512 = 2, ISA_AVX512_BF16 = 3 };
enum { ERROR_NONE = 0, ERROR_MEMORY = -1, ERROR_ISA = -2 };

/* Outputs of a block: one cache line of bfloat16, so threads never write to the same line. */
#define BLOCK 32
/* Numbers from one row of a block's results to the next: no power of two, or all rows would compete
 * for the same cache sets. */
#define BLOCK_STRIDE 40
/* Numbers in a cache line. */
#define LINE 32
/* Rows of x that are laid out at once; they stay in the second-level cache. */
#define MAX_ROWS 64
/* Outputs that are computed side by side. */
#define TILE_OUTPUTS 4
/* Bytes of weights in a task, about: many to read long pieces, few where threads would wait for the
 * last one. And how far ahead weights are asked for. Measured with benchmarks/kernels.py. */
#define MAX_TASK_BYTES (512 * 1024)
#define MIN_TASK_BYTES (128 * 1024)
#define TASKS_PER_THREAD 8
/* Rows whose products with a weight take about as long as reading it from memory. */
#define ROWS_OF_A_READ 8
#define AHEAD_BYTES (16 * 1024)
/* Bytes that the hidden rows of the experts of one round may take. */
#define MAX_HIDDEN_BYTES (8 * 1024 * 1024)
#define MAX_THREADS 256
#define SPIN_NS 20000
#define YIELD_NS 200000

/* How weights are quantised: `bits` of a code (0: they are bfloat16), weights of a `group` (0: a
 * whole row), and whether groups have zeros of their own. */
typedef struct {
    int bits, has_zeros;
    int64_t group;
} Quant;

/* What one instruction set provides. `lay_out` writes rows of x in the order in which `dots` reads
 * them, padded with zeros to whole steps; `dots` computes up to BLOCK outputs for all rows laid
 * out, results [rows][BLOCK_STRIDE], and asks for the weights at `next` while at the last ones. */
#define MAX_ROUTED 1024

/* A router by groups: the best `num_kept` of `num_groups` groups of experts take part. */
typedef struct {
    const float *bias; /* [E], part of the choice alone, or NULL */
    int64_t num_experts, num_groups, num_kept, top_k;
} Routing;

typedef struct {
    int max_tile_rows;
    int step;
    size_t element_bytes;
    void (*lay_out)(void *packed, const uint16_t *x, size_t k, int num_rows);
    void (*dots)(float *results, const uint16_t *w, size_t k, int num_outputs, const void *packed,
                 int num_rows, const uint16_t *next);
    void (*lay_out_quantized)(void *packed, const uint16_t *x, size_t k, int num_rows,
                              const Quant *quant);
    void (*dots_quantized)(float *results, const char *panel, size_t k, const void *packed,
                           int num_rows, const char *next, const Quant *quant);
    /* By activation: SiLU, GELU. */
    void (*gated[2])(uint16_t *hidden, size_t stride, const float *gate, const float *up,
                     int num_rows, int num_outputs);
    void (*store_bf16)(uint16_t *out, size_t stride, const float *results, const uint16_t *bias,
                       int num_rows, int num_outputs);
    void (*store_f32)(float *out, size_t stride, const float *results, const uint16_t *bias,
                      int num_rows, int num_outputs);
    void (*combine)(float *total, const uint16_t *rows, size_t width, const int64_t *places,
                    const float *weights, int num_places);
    int (*choose)(const float *logits, size_t num_logits, size_t banned, int64_t *best,
                  float *probability);
    void (*route)(const Routing *routing, const float *logits, float *scores, int64_t *ids,
                  float *weights);
    void (*norm)(uint16_t *out, const uint16_t *x, const uint16_t *weight, size_t width, float eps);
    void (*rotate)(uint16_t *out, const uint16_t *x, const uint16_t *cos, const uint16_t *sin,
                   size_t num_heads, size_t head_size, size_t half);
    void (*attend)(float *state, float *scores, const uint16_t *values, size_t head_size,
                   float scale, int num_rows, int num_keys);
    void (*store_attention)(uint16_t *out, const float *state, size_t head_size);
} Kernels;

/* ---- rows in tiles --------------------------------------------------------------------------- */

/* Rows of tile `tile` when `num_rows` are spread over tiles of at most `max_rows` each. */
INLINE int rows_of_tile(int num_rows, int num_tiles, int tile) {
    return num_rows / num_tiles + (tile < num_rows % num_tiles);
}

INLINE int tiles_of(int num_rows, int max_rows) { return (num_rows + max_rows - 1) / max_rows; }

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE size_t round_up(size_t value, size_t step) { return (value + step - 1) / step * step; }

/* Asks memory for a line. Into the second-level cache, as AHEAD_BYTES are a third of the first.
 * Weights are used once, but the hint that says so (locality 0) made products of few rows take three
 * times as long on one processor (Emerald Rapids). */
INLINE void ask(const void *line) { __builtin_prefetch(line, 0, 2); }

/* Where the weights lie that will be wanted soon, whole tiles ahead, or NULL. */
INLINE const uint16_t *weights_ahead(const uint16_t *w, size_t k, int output, int num_outputs,
                                     const uint16_t *next) {
    size_t distance = AHEAD_BYTES / (k * sizeof(uint16_t)) / TILE_OUTPUTS * TILE_OUTPUTS;
    if (distance < TILE_OUTPUTS) distance = TILE_OUTPUTS;
    if (distance > BLOCK - TILE_OUTPUTS) distance = BLOCK - TILE_OUTPUTS;
    int ahead = output + (int)distance;
    if (ahead < num_outputs) return w + (size_t)ahead * k;
    return next ? next + (size_t)(ahead - num_outputs) * k : NULL;
}

/* ---- what a block of results becomes; the compiler makes a version for each instruction set -- */

INLINE float widen(uint16_t value) {
    union { uint32_t bits; float number; } u = {.bits = (uint32_t)value << 16};
    return u.number;
}

/* To the nearest, ties to even; a NaN stays one. */
INLINE uint16_t narrow(float value) {
    union { float number; uint32_t bits; } u = {.number = value};
    uint32_t rounded = (u.bits + 0x7fffu + ((u.bits >> 16) & 1u)) >> 16;
    uint32_t quiet = (u.bits >> 16) | 0x40u;
    return (uint16_t)((u.bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

/* 2^n · p(r) with x·log2(e) = n + r; within 2 units in the last place over all of float. A NaN
 * passes through: it fails both comparisons. */
INLINE float exponential(float x) {
    const float shift = 12582912.0f; /* 1.5 · 2^23: adding it rounds to a whole number */
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    union { float number; uint32_t bits; } n = {.number = x * 1.44269504f + shift};
    float whole = n.number - shift;
    float r = (x - whole * 0.693145752f) - whole * 1.42860677e-6f;
    float p = 1.98756912e-4f;
    p = p * r + 1.39819994e-3f;
    p = p * r + 8.33345205e-3f;
    p = p * r + 4.16657962e-2f;
    p = p * r + 1.66666657e-1f;
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    union { uint32_t bits; float number; } scale = {.bits = (n.bits + 127u) << 23};
    return p * scale.number;
}

INLINE void swiglu_block(uint16_t *hidden, size_t stride, const float *gate, const float *up,
                         int num_rows, int num_outputs) {
    for (int row = 0; row < num_rows; row++) {
        uint16_t line[BLOCK];
        const float *g = gate + row * BLOCK_STRIDE, *u = up + row * BLOCK_STRIDE;
        for (int i = 0; i < BLOCK; i++) line[i] = narrow(g[i] / (1.0f + exponential(-g[i])) * u[i]);
        memcpy(hidden + row * stride, line, num_outputs * sizeof(uint16_t));
    }
}

/* GELU in its form with a tanh: 0.5 · (1 + tanh(u)) is the sigmoid of 2u, with
 * u = sqrt(2 / pi) · (x + 0.044715 · x^3). */
INLINE void geglu_block(uint16_t *hidden, size_t stride, const float *gate, const float *up,
                        int num_rows, int num_outputs) {
    for (int row = 0; row < num_rows; row++) {
        uint16_t line[BLOCK];
        const float *g = gate + row * BLOCK_STRIDE, *u = up + row * BLOCK_STRIDE;
        for (int i = 0; i < BLOCK; i++) {
            float turn = 1.5957691216f * (g[i] + 0.044715f * g[i] * g[i] * g[i]);
            line[i] = narrow(g[i] / (1.0f + exponential(-turn)) * u[i]);
        }
        memcpy(hidden + row * stride, line, num_outputs * sizeof(uint16_t));
    }
}

INLINE void store_bf16_block(uint16_t *out, size_t stride, const float *results,
                             const uint16_t *bias, int num_rows, int num_outputs) {
    float added[BLOCK] = {0};
    for (int i = 0; bias && i < num_outputs; i++) added[i] = widen(bias[i]);
    for (int row = 0; row < num_rows; row++) {
        uint16_t line[BLOCK];
        const float *from = results + row * BLOCK_STRIDE;
        for (int i = 0; i < BLOCK; i++) line[i] = narrow(from[i] + added[i]);
        memcpy(out + row * stride, line, num_outputs * sizeof(uint16_t));
    }
}

INLINE void store_f32_block(float *out, size_t stride, const float *results, const uint16_t *bias,
                            int num_rows, int num_outputs) {
    float added[BLOCK] = {0};
    for (int i = 0; bias && i < num_outputs; i++) added[i] = widen(bias[i]);
    for (int row = 0; row < num_rows; row++) {
        float line[BLOCK];
        const float *from = results + row * BLOCK_STRIDE;
        for (int i = 0; i < BLOCK; i++) line[i] = from[i] + added[i];
        memcpy(out + row * stride, line, num_outputs * sizeof(float));
    }
}

/* Numbers that are summed or compared side by side, and of which one partial result is made. */
#define LANES 32
#define CHUNK 1024

/* The sum of LANES partial sums, by halves: one after the other they are a chain that takes longer
 * than what they are sums of. Halves are constants, so that they stay in registers. */
#define FOLD(half) for (int l = 0; l < half; l++) x[l] += x[l + half];
INLINE float sum_of_lanes(float *x) {
    FOLD(16) FOLD(8) FOLD(4) FOLD(2)
    return x[0] + x[1];
}
#undef FOLD

#define FOLD(half)                                                                                 \
    for (int l = 0; l < half; l++) x[l] = x[l + half] > x[l] ? x[l + half] : x[l];
INLINE float largest_of_lanes(float *x) {
    FOLD(16) FOLD(8) FOLD(4) FOLD(2) FOLD(1)
    return x[0];
}
#undef FOLD

INLINE void combine_lanes(float *total, const uint16_t *rows, size_t width, size_t count,
                          const int64_t *places, const float *weights, int num_places) {
    float sums[LANES] = {0};
    for (int j = 0; j < num_places; j++) {
        uint16_t values[LANES] = {0};
        memcpy(values, rows + (size_t)places[j] * width, count * sizeof(uint16_t));
        for (int l = 0; l < LANES; l++) sums[l] += widen(values[l]) * weights[j];
    }
    memcpy(total, sums, count * sizeof(float));
}

/* total = sum of weights[j] * rows[places[j]], in that order. */
INLINE void combine_rows(float *total, const uint16_t *rows, size_t width, const int64_t *places,
                         const float *weights, int num_places) {
    size_t i = 0;
    for (; i + LANES <= width; i += LANES)
        combine_lanes(total + i, rows + i, width, LANES, places, weights, num_places);
    if (i < width)
        combine_lanes(total + i, rows + i, width, width - i, places, weights, num_places);
}

/* The largest of `count` numbers. `check` becomes NaN where one of them is not finite. */
INLINE float largest_of(const float *x, size_t count, float *check) {
    float largest[LANES], checks[LANES] = {0};
    for (int l = 0; l < LANES; l++) largest[l] = -3.40282347e38f;
    size_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int l = 0; l < LANES; l++) {
            largest[l] = x[i + l] > largest[l] ? x[i + l] : largest[l];
            checks[l] += x[i + l] * 0.0f;
        }
    for (; i < count; i++) {
        largest[0] = x[i] > largest[0] ? x[i] : largest[0];
        checks[0] += x[i] * 0.0f;
    }
    *check += sum_of_lanes(checks);
    return largest_of_lanes(largest);
}

#define TURNED 8

INLINE void rotate_some(uint16_t *restrict out, const uint16_t *x, const uint16_t *cos,
                        const uint16_t *sin, size_t half, int count) {
    for (int i = 0; i < count; i++) {
        float first = widen(x[i]), second = widen(x[half + i]), c = widen(cos[i]);
        float s = widen(sin[i]);
        out[i] = narrow(widen(narrow(first * c)) - widen(narrow(second * s)));
        out[half + i] = narrow(widen(narrow(second * c)) + widen(narrow(first * s)));
    }
}

/* The heads of one token turned by its angles: the first `half` dimensions with the next. Every
 * product and every difference is rounded, as torch does it. */
INLINE void rotate_row(uint16_t *out, const uint16_t *x, const uint16_t *cos, const uint16_t *sin,
                       size_t num_heads, size_t head_size, size_t half) {
    for (size_t head = 0; head < num_heads; head++, x += head_size, out += head_size) {
        size_t i = 0;
        for (; i + TURNED <= half; i += TURNED)
            rotate_some(out + i, x + i, cos + i, sin + i, half, TURNED);
        rotate_some(out + i, x + i, cos + i, sin + i, half, (int)(half - i));
        memcpy(out + 2 * half, x + 2 * half, (head_size - 2 * half) * sizeof(uint16_t));
    }
}

/* Where the largest of `count` numbers is, the first of equals; 0 where all are NaN. */
INLINE size_t place_of_largest(const float *x, size_t count) {
    float unused = 0.0f, largest = largest_of(x, count, &unused);
    size_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        int num_equal = 0;
        for (int l = 0; l < LANES; l++) num_equal += x[i + l] == largest;
        if (num_equal) break;
    }
    for (; i < count; i++)
        if (x[i] == largest) return i;
    return 0;
}

/* Sigmoids of one row's logits, the experts that they and the bias choose, best first, and the
 * shares of these. A group counts by its two best. */
INLINE void route_row(const Routing *r, const float *logits, float *scores, int64_t *ids,
                      float *weights) {
    float choice[MAX_ROUTED], groups[MAX_ROUTED];
    size_t num_experts = (size_t)r->num_experts, size = num_experts / (size_t)r->num_groups;
    for (size_t e = 0; e < num_experts; e++) scores[e] = 1.0f / (1.0f + exponential(-logits[e]));
    for (size_t e = 0; e < num_experts; e++) choice[e] = scores[e] + (r->bias ? r->bias[e] : 0.0f);
    if (r->num_kept < r->num_groups) {
        for (int64_t g = 0; g < r->num_groups; g++) {
            float best = -3.40282347e38f, second = -3.40282347e38f;
            for (size_t e = (size_t)g * size; e < ((size_t)g + 1) * size; e++) {
                float lower = choice[e] < best ? choice[e] : best;
                best = choice[e] > best ? choice[e] : best;
                second = lower > second ? lower : second;
            }
            groups[g] = best + second;
        }
        for (int64_t dropped = r->num_groups; dropped > r->num_kept; dropped--) {
            /* The worst, the last of equals, goes. */
            int64_t worst = 0;
            for (int64_t g = 1; g < r->num_groups; g++)
                if (groups[g] <= groups[worst]) worst = g;
            groups[worst] = INFINITY;
            for (size_t e = 0; e < size; e++) choice[(size_t)worst * size + e] = -INFINITY;
        }
    }
    float total = 0.0f;
    for (int64_t n = 0; n < r->top_k; n++) {
        size_t best = place_of_largest(choice, num_experts);
        choice[best] = -INFINITY;
        ids[n] = (int64_t)best;
        weights[n] = scores[best];
        total += scores[best];
    }
    for (int64_t n = 0; n < r->top_k && r->top_k > 1; n++) weights[n] /= total + 1e-20f;
}

/* Sum of exp(x - offset); few at a time in fp32, so that small ones are not lost beside large. */
INLINE float exponentials_of(const float *x, size_t count, float offset) {
    float sums[LANES] = {0};
    size_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int l = 0; l < LANES; l++) sums[l] += exponential(x[i + l] - offset);
    for (; i < count; i++) sums[0] += exponential(x[i] - offset);
    return sum_of_lanes(sums);
}

/* The first of the largest logits but `banned`, and its probability among all of them. Returns
 * whether all are finite. */
INLINE int choose_best(const float *logits, size_t num_logits, size_t banned, int64_t *best,
                       float *probability) {
    float largest = -3.40282347e38f, winner = -3.40282347e38f, check = 0.0f;
    size_t chunk = 0;
    for (size_t i = 0; i < num_logits; i += CHUNK) {
        size_t count = num_logits - i < CHUNK ? num_logits - i : CHUNK;
        float here = largest_of(logits + i, count, &check), allowed = here;
        if (banned >= i && banned < i + count) {
            float unused = 0.0f;
            allowed = largest_of(logits + i, banned - i, &unused);
            float behind = largest_of(logits + banned + 1, i + count - banned - 1, &unused);
            allowed = behind > allowed ? behind : allowed;
        }
        largest = here > largest ? here : largest;
        if (allowed > winner) {
            winner = allowed;
            chunk = i;
        }
    }
    size_t place = chunk;
    while (place + 1 < num_logits && (place == banned || logits[place] != winner)) place++;
    double total = 0.0;
    for (size_t i = 0; i < num_logits; i += CHUNK)
        total += exponentials_of(logits + i, num_logits - i < CHUNK ? num_logits - i : CHUNK,
                                 largest);
    *best = (int64_t)place;
    *probability = (float)(exponential(winner - largest) / total);
    return check == 0.0f;
}

/* x / sqrt(mean(x^2) + eps), rounded, times weight, rounded again. */
INLINE void norm_row(uint16_t *out, const uint16_t *x, const uint16_t *weight, size_t width,
                     float eps) {
    float sums[LANES] = {0};
    size_t i = 0;
    for (; i + LANES <= width; i += LANES)
        for (int l = 0; l < LANES; l++) sums[l] += widen(x[i + l]) * widen(x[i + l]);
    for (; i < width; i++) sums[0] += widen(x[i]) * widen(x[i]);
    float scale = 1.0f / __builtin_sqrtf(sum_of_lanes(sums) / (float)width + eps);
    for (i = 0; i < width; i++)
        out[i] = narrow(widen(narrow(widen(x[i]) * scale)) * widen(weight[i]));
}

#define F32_LANES 16
#define F32_ROWS 4
typedef float Float16 __attribute__((vector_size(64)));

/* Attention of a few rows: keys come in blocks, and what is known after each is kept in `state`:
 * for each row the largest score so far, the sum of exponentials, and the weighted values. */
#define MAX_HEAD_SIZE 256
#define VALUE_LANES 64
#define STATE_STRIDE(head_size) (2 + round_up(head_size, VALUE_LANES))

INLINE void weigh_values(float *state, size_t stride, const float *p, const float *values,
                         size_t width, const int num_rows, int num_keys) {
    for (size_t c = 0; c < width; c += VALUE_LANES) {
        Float16 sums[F32_ROWS][VALUE_LANES / F32_LANES];
        for (int t = 0; t < num_rows; t++) memcpy(sums[t], state + t * stride + 2 + c, sizeof *sums);
        for (int j = 0; j < num_keys; j++) {
            Float16 value[VALUE_LANES / F32_LANES];
            memcpy(value, values + j * width + c, sizeof value);
            for (int t = 0; t < num_rows; t++)
                for (int v = 0; v < VALUE_LANES / F32_LANES; v++)
                    sums[t][v] += value[v] * p[t * BLOCK_STRIDE + j];
        }
        for (int t = 0; t < num_rows; t++) memcpy(state + t * stride + 2 + c, sums[t], sizeof *sums);
    }
}

/* One block of keys: scores [rows][BLOCK_STRIDE] become weights, values [keys, head_size] are
 * added. */
INLINE void attend_block(float *state, float *scores, const uint16_t *values, size_t head_size,
                         float scale, int num_rows, int num_keys) {
    size_t width = round_up(head_size, VALUE_LANES), stride = STATE_STRIDE(head_size);
    float wide[BLOCK * MAX_HEAD_SIZE];
    for (int j = 0; j < num_keys; j++) {
        for (size_t i = 0; i < head_size; i++) wide[j * width + i] = widen(values[j * head_size + i]);
        for (size_t i = head_size; i < width; i++) wide[j * width + i] = 0.0f;
    }
    for (int t = 0; t < num_rows; t++) {
        float *row = state + t * stride, *p = scores + t * BLOCK_STRIDE;
        float largest = row[0], sum = 0.0f;
        for (int j = 0; j < num_keys; j++) {
            p[j] *= scale;
            largest = p[j] > largest ? p[j] : largest;
        }
        for (int j = num_keys; j < BLOCK; j++) p[j] = -3.40282347e38f;
        for (int j = 0; j < BLOCK; j++) p[j] = exponential(p[j] - largest);
        for (int j = 0; j < num_keys; j++) sum += p[j];
        float shrink = exponential(row[0] - largest);
        if (row[0] != largest)
            for (size_t i = 1; i < 2 + width; i++) row[i] *= shrink;
        row[0] = largest;
        row[1] += sum;
    }
    for (int t = 0; t < num_rows; t += F32_ROWS) {
        float *rows = state + t * stride, *p = scores + t * BLOCK_STRIDE;
        switch (num_rows - t) {
        case 1: weigh_values(rows, stride, p, wide, width, 1, num_keys); break;
        case 2: weigh_values(rows, stride, p, wide, width, 2, num_keys); break;
        case 3: weigh_values(rows, stride, p, wide, width, 3, num_keys); break;
        default: weigh_values(rows, stride, p, wide, width, F32_ROWS, num_keys);
        }
    }
}

INLINE void store_attention_row(uint16_t *out, const float *state, size_t head_size) {
    for (size_t i = 0; i < head_size; i++) out[i] = narrow(state[2 + i] / state[1]);
}

#define BLOCK_FUNCTIONS(suffix, attributes)                                                        \
    attributes static void swiglu_##suffix(uint16_t *hidden, size_t stride, const float *gate,     \
                                           const float *up, int num_rows, int num_outputs) {       \
        swiglu_block(hidden, stride, gate, up, num_rows, num_outputs);                             \
    }                                                                                              \
    attributes static void geglu_##suffix(uint16_t *hidden, size_t stride, const float *gate,      \
                                          const float *up, int num_rows, int num_outputs) {        \
        geglu_block(hidden, stride, gate, up, num_rows, num_outputs);                              \
    }                                                                                              \
    attributes static void store_bf16_##suffix(uint16_t *out, size_t stride, const float *results, \
                                               const uint16_t *bias, int num_rows,                 \
                                               int num_outputs) {                                  \
        store_bf16_block(out, stride, results, bias, num_rows, num_outputs);                       \
    }                                                                                              \
    attributes static void store_f32_##suffix(float *out, size_t stride, const float *results,     \
                                              const uint16_t *bias, int num_rows,                  \
                                              int num_outputs) {                                   \
        store_f32_block(out, stride, results, bias, num_rows, num_outputs);                        \
    }                                                                                              \
    attributes static void combine_##suffix(float *total, const uint16_t *rows, size_t width,      \
                                            const int64_t *places, const float *weights,           \
                                            int num_places) {                                      \
        combine_rows(total, rows, width, places, weights, num_places);                             \
    }                                                                                              \
    attributes static int choose_##suffix(const float *logits, size_t num_logits, size_t banned,   \
                                          int64_t *best, float *probability) {                     \
        return choose_best(logits, num_logits, banned, best, probability);                         \
    }                                                                                              \
    attributes static void rotate_##suffix(uint16_t *out, const uint16_t *x, const uint16_t *cos,  \
                                           const uint16_t *sin, size_t num_heads,                  \
                                           size_t head_size, size_t half) {                        \
        rotate_row(out, x, cos, sin, num_heads, head_size, half);                                  \
    }                                                                                              \
    attributes static void route_##suffix(const Routing *routing, const float *logits,             \
                                          float *scores, int64_t *ids, float *weights) {           \
        route_row(routing, logits, scores, ids, weights);                                          \
    }                                                                                              \
    attributes static void norm_##suffix(uint16_t *out, const uint16_t *x, const uint16_t *weight, \
                                         size_t width, float eps) {                                \
        norm_row(out, x, weight, width, eps);                                                      \
    }                                                                                              \
    attributes static void attend_##suffix(float *state, float *scores, const uint16_t *values,    \
                                           size_t head_size, float scale, int num_rows,            \
                                           int num_keys) {                                         \
        attend_block(state, scores, values, head_size, scale, num_rows, num_keys);                 \
    }                                                                                              \
    attributes static void store_attention_##suffix(uint16_t *out, const float *state,             \
                                                    size_t head_size) {                            \
        store_attention_row(out, state, head_size);                                                \
    }

/* `dots` of an instruction set: outputs in tiles of TILE_OUTPUTS, rows in tiles of which each is
 * computed by `function(rows, num_ahead, ...)`. Both are constants there, so that sums stay in
 * registers and asking costs one instruction a line. The tiles share the asking for weights ahead,
 * or memory would be idle during all but the first. */
#define TILE_AHEAD(function, rows, num_ahead)                                                      \
    case rows * 8 + num_ahead:                                                                     \
        function(rows, num_ahead, target, from, k, num_outputs - o, x, ahead);                     \
        break;
#define TILE(function, rows)                                                                       \
    TILE_AHEAD(function, rows, 0)                                                                  \
    TILE_AHEAD(function, rows, 1)                                                                  \
    TILE_AHEAD(function, rows, 2)                                                                  \
    TILE_AHEAD(function, rows, 4)

#define DOTS(suffix, attributes, element, step, max_tile_rows, cases)                              \
    attributes static void dots_##suffix(float *results, const uint16_t *w, size_t k,              \
                                         int num_outputs, const void *packed, int num_rows,        \
                                         const uint16_t *next) {                                   \
        int num_tiles = tiles_of(num_rows, max_tile_rows);                                         \
        for (int o = 0; o < num_outputs; o += TILE_OUTPUTS) {                                      \
            const uint16_t *from = w + (size_t)o * k;                                              \
            const uint16_t *ahead = weights_ahead(w, k, o, num_outputs, next);                     \
            int left = ahead ? TILE_OUTPUTS : 0;                                                   \
            const element *x = packed;                                                             \
            float *target = results + o;                                                           \
            for (int tile = 0; tile < num_tiles; tile++) {                                         \
                int rows = rows_of_tile(num_rows, num_tiles, tile);                                \
                int num_ahead = tiles_of(left, num_tiles - tile);                                  \
                if (num_ahead == 3) num_ahead = 2;                                                 \
                switch (rows * 8 + num_ahead) { cases }                                            \
                left -= num_ahead;                                                                 \
                if (ahead) ahead += num_ahead * k;                                                 \
                x += round_up(k, step) * rows;                                                     \
                target += rows * BLOCK_STRIDE;                                                     \
            }                                                                                      \
        }                                                                                          \
    }

/* Asks for `num_ahead` lines of as many rows of weights, the share of the step at place `i`. One
 * tile alone asks in the order of memory, which is fastest; several ask for rows side by side. */
INLINE void ask_for(const uint16_t *ahead, const int num_ahead, size_t k, size_t i) {
    for (int n = 0; n < num_ahead; n++) {
        size_t place = num_ahead == TILE_OUTPUTS ? i * TILE_OUTPUTS + n * LINE : n * k + i;
        ask(ahead + place);
    }
}

/* ---- quantised weights: a lane is an output -------------------------------------------------- */

/* A panel is 32 outputs side by side, so scales are vectors like the codes, x is one number for all
 * lanes, and no sum crosses lanes. Codes are not shifted to the right: x comes multiplied with the
 * power of two that undoes where in the word they stand, which is exact. Sums of code · x are made
 * over spans, parts of a group; then total += scale · (sum - zero · sum of x).
 *
 *     group  | scales bfloat16 [32] | zeros uint8 [32], or nothing | words [steps][32] |
 *     x      span after span, in each tile after tile: | [weights of the span][rows] | sums [rows] |
 */
#define SPAN 128
#define QUANT_LANES 8
#define QUANT_VECTORS (BLOCK / QUANT_LANES)
#define QUANT_TILE_ROWS 6
typedef float FloatQ __attribute__((vector_size(32)));
typedef uint32_t BitsQ __attribute__((vector_size(32)));
typedef int32_t IntQ __attribute__((vector_size(32)));
typedef uint16_t HalfQ __attribute__((vector_size(16)));
typedef uint8_t ByteQ __attribute__((vector_size(8)));

INLINE size_t group_of(const Quant *quant, size_t k) {
    return quant->group && (size_t)quant->group < k ? (size_t)quant->group : k;
}

INLINE size_t header_bytes(const Quant *quant) { return BLOCK * (quant->has_zeros ? 3 : 2); }

/* Weights of the span that begins at `first`. */
INLINE size_t span_length(size_t first, size_t group, size_t k) {
    size_t left = group - first % group;
    left = k - first < left ? k - first : left;
    return left < SPAN ? left : SPAN;
}

INLINE size_t words_of(int bits, size_t count) { return (count * (size_t)bits + 31) / 32; }

/* Bytes of 32 outputs. */
INLINE size_t panel_bytes(const Quant *quant, size_t k) {
    size_t group = group_of(quant, k), bytes = 0;
    for (size_t first = 0; first < k; first += group) {
        size_t count = k - first < group ? k - first : group;
        bytes += header_bytes(quant) + words_of(quant->bits, count) * BLOCK * sizeof(uint32_t);
    }
    return bytes;
}

/* Bytes of a row of x, laid out. */
static size_t quantized_row_bytes(const Quant *quant, size_t k) {
    size_t group = group_of(quant, k), numbers = 0;
    for (size_t first = 0; first < k; first += group) {
        size_t count = k - first < group ? k - first : group;
        numbers += words_of(quant->bits, count) * (32 / (size_t)quant->bits);
        numbers += (count + SPAN - 1) / SPAN * 3;
    }
    return numbers * sizeof(float);
}

/* `count` numbers of one row to every `stride`-th place, and their sum. */
INLINE float lay_out_span(const int bits, float *target, const uint16_t *x, size_t count,
                          const int stride) {
    const int codes = 32 / bits;
    float factors[8], sums[8] = {0};
    /* The last code of a word is shifted, since the sign is there. */
    for (int j = 0; j < codes; j++) factors[j] = j < codes - 1 ? 1.0f / (1u << bits * j) : 1.0f;
    size_t i = 0;
    for (; i + codes <= count; i += codes)
        for (int j = 0; j < codes; j++) target[(i + j) * stride] = widen(x[i + j]) * factors[j];
    if (i < count)
        for (int j = 0; j < codes; j++)
            target[(i + j) * stride] = i + j < count ? widen(x[i + j]) * factors[j] : 0.0f;
    for (i = 0; i + 8 <= count; i += 8)
        for (int j = 0; j < 8; j++) sums[j] += widen(x[i + j]);
    for (int j = 0; i < count; i++, j++) sums[j] += widen(x[i]);
    return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

INLINE void lay_out_quantized_rows(const int bits, float *packed, const uint16_t *x, size_t k,
                                   int num_rows, const Quant *quant) {
    int num_tiles = tiles_of(num_rows, QUANT_TILE_ROWS);
    size_t group = group_of(quant, k), count;
    for (size_t first = 0; first < k; first += count) {
        count = span_length(first, group, k);
        size_t padded = words_of(bits, count) * (32 / bits);
        const uint16_t *from = x + first;
        for (int tile = 0; tile < num_tiles; tile++) {
            int rows = rows_of_tile(num_rows, num_tiles, tile);
            float *sums = packed + padded * rows;
            for (int t = 0; t < rows; t++, from += k)
                switch (rows) {
                case 1: sums[t] = lay_out_span(bits, packed + t, from, count, 1); break;
                case 2: sums[t] = lay_out_span(bits, packed + t, from, count, 2); break;
                case 3: sums[t] = lay_out_span(bits, packed + t, from, count, 3); break;
                case 4: sums[t] = lay_out_span(bits, packed + t, from, count, 4); break;
                case 5: sums[t] = lay_out_span(bits, packed + t, from, count, 5); break;
                default: sums[t] = lay_out_span(bits, packed + t, from, count, 6);
                }
            packed = sums + rows;
        }
    }
}

/* What is needed of a span: its words, the headers of its group, and what to ask for meanwhile. */
typedef struct {
    const uint32_t *words;
    const uint16_t *scales;
    const uint8_t *zeros;
    const char *ahead;
    int steps;
} QuantSpan;

/* A panel of `bytes`, and how far reading has come in it. `next`: the panel after it, or NULL. */
typedef struct {
    const char *start, *place, *next;
    size_t bytes;
} Panel;

INLINE Panel open_panel(const char *start, size_t k, const char *next, const Quant *quant) {
    return (Panel){start, start, next, panel_bytes(quant, k)};
}

/* The next span, of `count` weights; it follows `before` where it begins no group. */
INLINE QuantSpan take_span(const int bits, Panel *panel, QuantSpan before, size_t count,
                           int begins_group, const Quant *quant) {
    QuantSpan span = before;
    const char *place = panel->place;
    if (begins_group) {
        span.scales = (const uint16_t *)place;
        span.zeros = quant->has_zeros ? (const uint8_t *)place + 2 * BLOCK : NULL;
        place += header_bytes(quant);
    }
    span.words = (const uint32_t *)place;
    span.steps = (int)words_of(bits, count);
    size_t distance = panel->bytes < AHEAD_BYTES ? panel->bytes : AHEAD_BYTES;
    size_t ahead = (size_t)(place - panel->start) + distance;
    span.ahead = ahead < panel->bytes ? panel->start + ahead
                 : panel->next        ? panel->next + (ahead - panel->bytes)
                                      : place;
    panel->place = place + (size_t)span.steps * BLOCK * sizeof(uint32_t);
    return span;
}

INLINE void load_scales(FloatQ *scale, const uint16_t *from) {
    HalfQ half;
    memcpy(&half, from, sizeof half);
    BitsQ bits = __builtin_convertvector(half, BitsQ) << 16;
    memcpy(scale, &bits, sizeof bits);
}

/* `rows` of x against `vectors` vectors of a panel's outputs, the first of them `first`. */
INLINE void tile_quantized(const int bits, const int rows, const int vectors, float *results,
                           const QuantSpan *span, int first, const float *x) {
    const int codes = 32 / bits;
    FloatQ sums[QUANT_TILE_ROWS][QUANT_VECTORS];
    for (int t = 0; t < rows; t++)
        for (int v = 0; v < vectors; v++) sums[t][v] = (FloatQ){0};
    const uint32_t *words = span->words + first * QUANT_LANES;
    const char *ahead = span->ahead;
    for (int step = 0; step < span->steps; step++, words += BLOCK, ahead += 128) {
        ask(ahead);
        ask(ahead + 64);
#pragma GCC unroll 8
        for (int j = 0; j < codes; j++, x += rows) {
            const uint32_t mask = ((1u << bits) - 1) << (bits * j);
            FloatQ numbers[QUANT_VECTORS];
            for (int v = 0; v < vectors; v++) {
                BitsQ word;
                memcpy(&word, words + v * QUANT_LANES, sizeof word);
                BitsQ code = j < codes - 1 ? word & mask : word >> (32 - bits);
                numbers[v] = __builtin_convertvector((IntQ)code, FloatQ);
            }
            for (int t = 0; t < rows; t++)
                for (int v = 0; v < vectors; v++) sums[t][v] += numbers[v] * x[t];
        }
    }
    for (int v = 0; v < vectors; v++) {
        FloatQ scale, zero = (FloatQ){0} + (float)(1 << (bits - 1));
        load_scales(&scale, span->scales + (first + v) * QUANT_LANES);
        if (span->zeros) {
            ByteQ bytes;
            memcpy(&bytes, span->zeros + (first + v) * QUANT_LANES, sizeof bytes);
            zero = __builtin_convertvector(__builtin_convertvector(bytes, IntQ), FloatQ);
        }
        for (int t = 0; t < rows; t++) {
            float *result = results + t * BLOCK_STRIDE + (first + v) * QUANT_LANES;
            FloatQ total;
            memcpy(&total, result, sizeof total);
            total += scale * (sums[t][v] - zero * x[t]);
            memcpy(result, &total, sizeof total);
        }
    }
}

#define QUANT_HALVES(rows)                                                                         \
    tile_quantized(bits, rows, 2, results, span, 0, x);                                            \
    tile_quantized(bits, rows, 2, results, span, 2, x);                                            \
    break;

/* Few rows take all outputs of a panel at once, more take halves: sums stay in registers. */
INLINE void rows_quantized(const int bits, int rows, float *results, const QuantSpan *span,
                           const float *x) {
    switch (rows) {
    case 1: tile_quantized(bits, 1, 4, results, span, 0, x); break;
    case 2: tile_quantized(bits, 2, 4, results, span, 0, x); break;
    case 3: QUANT_HALVES(3)
    case 4: QUANT_HALVES(4)
    case 5: QUANT_HALVES(5)
    default: QUANT_HALVES(6)
    }
}

INLINE void panel_quantized(const int bits, float *results, const char *start, size_t k,
                            const float *x, int num_rows, const char *next, const Quant *quant) {
    int num_tiles = tiles_of(num_rows, QUANT_TILE_ROWS);
    size_t group = group_of(quant, k), count;
    Panel panel = open_panel(start, k, next, quant);
    QuantSpan span = {0};
    for (int row = 0; row < num_rows; row++)
        memset(results + row * BLOCK_STRIDE, 0, BLOCK * sizeof(float));
    for (size_t first = 0; first < k; first += count) {
        count = span_length(first, group, k);
        span = take_span(bits, &panel, span, count, first % group == 0, quant);
        float *target = results;
        for (int tile = 0; tile < num_tiles; tile++) {
            int rows = rows_of_tile(num_rows, num_tiles, tile);
            rows_quantized(bits, rows, target, &span, x);
            target += rows * BLOCK_STRIDE;
            x += ((size_t)span.steps * (32 / bits) + 1) * rows;
            span.ahead = (const char *)span.words;
        }
    }
}

#define QUANTIZED_FUNCTIONS(suffix, attributes)                                                    \
    attributes static void lay_out_quantized_##suffix(void *packed, const uint16_t *x, size_t k,   \
                                                      int num_rows, const Quant *quant) {          \
        if (quant->bits == 4)                                                                      \
            lay_out_quantized_rows(4, packed, x, k, num_rows, quant);                              \
        else                                                                                       \
            lay_out_quantized_rows(8, packed, x, k, num_rows, quant);                              \
    }                                                                                              \
    attributes static void dots_quantized_##suffix(float *results, const char *panel, size_t k,    \
                                                   const void *packed, int num_rows,               \
                                                   const char *next, const Quant *quant) {         \
        if (quant->bits == 4)                                                                      \
            panel_quantized(4, results, panel, k, packed, num_rows, next, quant);                  \
        else                                                                                       \
            panel_quantized(8, results, panel, k, packed, num_rows, next, quant);                  \
    }

/* ---- any processor: 8 lanes of fp32, which the compiler maps to what there is ---------------- */

#define GENERIC_STEP 8
#define GENERIC_TILE_ROWS 2
typedef float Float8 __attribute__((vector_size(32)));
typedef uint32_t Bits8 __attribute__((vector_size(32)));
typedef uint16_t Half8 __attribute__((vector_size(16)));

INLINE void lay_out_f32(float *packed, const uint16_t *x, size_t k, int num_rows, int step,
                        int max_tile_rows, int is_split) {
    int num_tiles = tiles_of(num_rows, max_tile_rows);
    for (int tile = 0; tile < num_tiles; tile++) {
        int rows = rows_of_tile(num_rows, num_tiles, tile);
        for (int row = 0; row < rows; row++, x += k) {
            for (size_t i = 0; i < round_up(k, step); i++) {
                /* Split: even places first, then odd ones, as two halves of a 32-bit word are. */
                size_t lane = i % step;
                size_t place = is_split ? lane / 2 + lane % 2 * (step / 2) : lane;
                packed[(i / step * rows + row) * step + place] = i < k ? widen(x[i]) : 0.0f;
            }
        }
        packed += round_up(k, step) * rows;
    }
}

static void lay_out_generic(void *packed, const uint16_t *x, size_t k, int num_rows) {
    lay_out_f32(packed, x, k, num_rows, GENERIC_STEP, GENERIC_TILE_ROWS, 0);
}

INLINE void load_generic(Float8 *value, const uint16_t *w, size_t count) {
    Half8 half = {0};
    memcpy(&half, w, count * sizeof(uint16_t));
    Bits8 bits = __builtin_convertvector(half, Bits8) << 16;
    memcpy(value, &bits, sizeof bits);
}

INLINE void tile_generic(const int rows, const int num_ahead, float *results,
                         const uint16_t *w, size_t k, int valid, const float *x,
                         const uint16_t *ahead) {
    Float8 sums[GENERIC_TILE_ROWS][TILE_OUTPUTS];
    memset(sums, 0, sizeof sums);
    for (size_t i = 0; i < k; i += GENERIC_STEP, x += GENERIC_STEP * rows) {
        size_t count = k - i < GENERIC_STEP ? k - i : GENERIC_STEP;
        if (i % LINE == 0) ask_for(ahead, num_ahead, k, i);
        for (int o = 0; o < TILE_OUTPUTS; o++) {
            const uint16_t *source = w + (size_t)(o < valid ? o : valid - 1) * k + i;
            Float8 weight;
            if (count == GENERIC_STEP)
                load_generic(&weight, source, GENERIC_STEP);
            else
                load_generic(&weight, source, count);
            for (int t = 0; t < rows; t++) {
                Float8 value;
                memcpy(&value, x + t * GENERIC_STEP, sizeof value);
                sums[t][o] += weight * value;
            }
        }
    }
    for (int t = 0; t < rows; t++)
        for (int o = 0; o < TILE_OUTPUTS; o++) {
            Float8 s = sums[t][o];
            results[t * BLOCK_STRIDE + o] =
                ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
        }
}

DOTS(generic, , float, GENERIC_STEP, GENERIC_TILE_ROWS,
     TILE(tile_generic, 1) TILE(tile_generic, 2))
QUANTIZED_FUNCTIONS(generic, )
BLOCK_FUNCTIONS(generic, )

static const Kernels GENERIC = {
    GENERIC_TILE_ROWS, GENERIC_STEP, sizeof(float), lay_out_generic, dots_generic,
    lay_out_quantized_generic, dots_quantized_generic,
    {swiglu_generic, geglu_generic}, store_bf16_generic, store_f32_generic, combine_generic,
    choose_generic,
    route_generic, norm_generic, rotate_generic, attend_generic, store_attention_generic,
};

#if HAS_X86

/* ---- AVX2 and FMA: bfloat16 is the upper half of fp32 ---------------------------------------- */

#define AVX2 __attribute__((target("avx2,fma")))
#define AVX2_STEP 16
#define AVX2_TILE_ROWS 3

static void lay_out_avx2(void *packed, const uint16_t *x, size_t k, int num_rows) {
    lay_out_f32(packed, x, k, num_rows, AVX2_STEP, AVX2_TILE_ROWS, 1);
}

/* One step of 16 weights of each output: even places are shifted up, odd ones masked. */
AVX2 INLINE void step_avx2(const int rows, __m256 sums[][TILE_OUTPUTS], const uint16_t *const *w,
                           size_t i, const float *x) {
    const __m256i upper = _mm256_set1_epi32((int)0xffff0000);
    for (int o = 0; o < TILE_OUTPUTS; o++) {
        __m256i pair = _mm256_loadu_si256((const __m256i *)(w[o] + i));
        __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16));
        __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(pair, upper));
        for (int t = 0; t < rows; t++) {
            const float *row = x + t * AVX2_STEP;
            sums[t][o] = _mm256_fmadd_ps(even, _mm256_loadu_ps(row), sums[t][o]);
            sums[t][o] = _mm256_fmadd_ps(odd, _mm256_loadu_ps(row + 8), sums[t][o]);
        }
    }
}

AVX2 INLINE void tile_avx2(const int rows, const int num_ahead, float *results,
                           const uint16_t *w, size_t k, int valid, const float *x,
                           const uint16_t *ahead) {
    const uint16_t *from[TILE_OUTPUTS];
    for (int o = 0; o < TILE_OUTPUTS; o++) from[o] = w + (size_t)(o < valid ? o : valid - 1) * k;
    __m256 sums[AVX2_TILE_ROWS][TILE_OUTPUTS];
    for (int t = 0; t < rows; t++)
        for (int o = 0; o < TILE_OUTPUTS; o++) sums[t][o] = _mm256_setzero_ps();
    size_t i = 0;
    for (; i + AVX2_STEP <= k; i += AVX2_STEP, x += AVX2_STEP * rows) {
        if (i % LINE == 0) ask_for(ahead, num_ahead, k, i);
        step_avx2(rows, sums, from, i, x);
    }
    if (i < k) {
        uint16_t tail[TILE_OUTPUTS][AVX2_STEP] = {{0}};
        const uint16_t *tails[TILE_OUTPUTS];
        for (int o = 0; o < TILE_OUTPUTS; o++) {
            memcpy(tail[o], from[o] + i, (k - i) * sizeof(uint16_t));
            tails[o] = tail[o];
        }
        step_avx2(rows, sums, tails, 0, x);
    }
    for (int t = 0; t < rows; t++) {
        __m256 ab = _mm256_hadd_ps(sums[t][0], sums[t][1]);
        __m256 cd = _mm256_hadd_ps(sums[t][2], sums[t][3]);
        __m256 all = _mm256_hadd_ps(ab, cd);
        __m128 four = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
        _mm_storeu_ps(results + t * BLOCK_STRIDE, four);
    }
}

DOTS(avx2, AVX2, float, AVX2_STEP, AVX2_TILE_ROWS,
     TILE(tile_avx2, 1) TILE(tile_avx2, 2) TILE(tile_avx2, 3))
QUANTIZED_FUNCTIONS(avx2, AVX2)
BLOCK_FUNCTIONS(avx2, AVX2)

static const Kernels AVX2_KERNELS = {
    AVX2_TILE_ROWS, AVX2_STEP, sizeof(float), lay_out_avx2, dots_avx2,
    lay_out_quantized_avx2, dots_quantized_avx2,
    {swiglu_avx2, geglu_avx2}, store_bf16_avx2, store_f32_avx2, combine_avx2,
    choose_avx2,
    route_avx2, norm_avx2, rotate_avx2, attend_avx2, store_attention_avx2,
};

/* ---- AVX-512: the same with 16 lanes --------------------------------------------------------- */

#define AVX512 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq")))
#define AVX512_STEP 32
#define AVX512_TILE_ROWS 5

/* 32 numbers in bfloat16 are two vectors of 16: those at even places, those at odd ones. */
AVX512 INLINE __m512 even_places(__m512i pairs) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
}

AVX512 INLINE __m512 odd_places(__m512i pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000)));
}

/* The first of `left` numbers, the rest of 32 zeros. */
AVX512 INLINE __m512i load_numbers(const uint16_t *x, size_t left) {
    return _mm512_maskz_loadu_epi16(left < 32 ? (1u << left) - 1 : ~0u, x);
}

AVX512 static void lay_out_avx512(void *packed, const uint16_t *x, size_t k, int num_rows) {
    float *target = packed;
    int num_tiles = tiles_of(num_rows, AVX512_TILE_ROWS);
    for (int tile = 0; tile < num_tiles; tile++) {
        int rows = rows_of_tile(num_rows, num_tiles, tile);
        for (int row = 0; row < rows; row++, x += k)
            for (size_t i = 0; i < k; i += AVX512_STEP) {
                __m512i value = load_numbers(x + i, k - i);
                float *place = target + (i / AVX512_STEP * rows + row) * AVX512_STEP;
                _mm512_storeu_ps(place, even_places(value));
                _mm512_storeu_ps(place + 16, odd_places(value));
            }
        target += round_up(k, AVX512_STEP) * rows;
    }
}

/* Sums of four accumulators' lanes, as four numbers. */
AVX512 INLINE __m128 sum_lanes(__m512 a, __m512 b, __m512 c, __m512 d) {
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    __m512 sums = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(sums), _mm512_extractf32x8_ps(sums, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

AVX512 INLINE void step_avx512(const int rows, __m512 sums[][TILE_OUTPUTS], const __m512i *weights,
                               const float *x) {
    __m512 even[TILE_OUTPUTS], odd[TILE_OUTPUTS];
    for (int o = 0; o < TILE_OUTPUTS; o++) {
        even[o] = even_places(weights[o]);
        odd[o] = odd_places(weights[o]);
    }
    for (int t = 0; t < rows; t++, x += AVX512_STEP) {
        __m512 value = _mm512_loadu_ps(x);
        for (int o = 0; o < TILE_OUTPUTS; o++)
            sums[t][o] = _mm512_fmadd_ps(even[o], value, sums[t][o]);
        value = _mm512_loadu_ps(x + 16);
        for (int o = 0; o < TILE_OUTPUTS; o++)
            sums[t][o] = _mm512_fmadd_ps(odd[o], value, sums[t][o]);
    }
}

AVX512 INLINE void tile_avx512(const int rows, const int num_ahead, float *results,
                               const uint16_t *w, size_t k, int valid, const float *x,
                               const uint16_t *ahead) {
    const uint16_t *from[TILE_OUTPUTS];
    for (int o = 0; o < TILE_OUTPUTS; o++) from[o] = w + (size_t)(o < valid ? o : valid - 1) * k;
    __m512 sums[AVX512_TILE_ROWS][TILE_OUTPUTS];
    for (int t = 0; t < rows; t++)
        for (int o = 0; o < TILE_OUTPUTS; o++) sums[t][o] = _mm512_setzero_ps();
    __m512i weights[TILE_OUTPUTS];
    size_t i = 0;
    for (; i + AVX512_STEP <= k; i += AVX512_STEP, x += AVX512_STEP * rows) {
        ask_for(ahead, num_ahead, k, i);
        for (int o = 0; o < TILE_OUTPUTS; o++) weights[o] = _mm512_loadu_si512(from[o] + i);
        step_avx512(rows, sums, weights, x);
    }
    if (i < k) {
        for (int o = 0; o < TILE_OUTPUTS; o++) weights[o] = load_numbers(from[o] + i, k - i);
        step_avx512(rows, sums, weights, x);
    }
    for (int t = 0; t < rows; t++)
        _mm_storeu_ps(results + t * BLOCK_STRIDE,
                      sum_lanes(sums[t][0], sums[t][1], sums[t][2], sums[t][3]));
}

DOTS(avx512, AVX512, float, AVX512_STEP, AVX512_TILE_ROWS,
     TILE(tile_avx512, 1) TILE(tile_avx512, 2) TILE(tile_avx512, 3)
     TILE(tile_avx512, 4) TILE(tile_avx512, 5))
BLOCK_FUNCTIONS(avx512, AVX512)

/* Quantised weights. Codes of int8 are converted where they stand, as above. Those of int4 are moved,
 * two at a time, to where they end the upper half of a mantissa, and an exponent is put before them:
 * that makes 256 + code of one and 16 + code of the other, with fewer instructions. Sums begin at
 * what takes the 256 and 16 back.
 *
 *     x      span after span, in each tile after tile: | starts [2][rows] | sums [rows] |
 *            [weights of the span][rows] |
 *
 * Every output has two sums, of codes in turn, in the order of `code_at`. Several tiles share what
 * is decoded. */
#define ZMM_LANES 16
#define ZMMS_OF_BLOCK (BLOCK / ZMM_LANES)

/* Which code of its word comes as the nth. */
INLINE int code_at(const int bits, const int n) {
    if (bits == 8) return n;
    return n % 2 ? n - 1 : (n + 7) % 8;
}

AVX512 INLINE __m512 decode(const int bits, const int n, __m512i words) {
    if (bits == 8) {
        __m512i codes = n < 3 ? _mm512_and_si512(words, _mm512_set1_epi32(0xff << 8 * n))
                              : _mm512_srli_epi32(words, 24);
        return _mm512_cvtepi32_ps(codes);
    }
    __m512i moved = n < 2   ? _mm512_ror_epi32(words, 13)
                    : n < 4 ? _mm512_slli_epi32(words, 11)
                    : n < 6 ? _mm512_slli_epi32(words, 3)
                            : _mm512_srli_epi32(words, 5);
    __m512i mask = _mm512_set1_epi32(n % 2 ? 0x00780000 : 0x00078000);
    __m512i exponent = _mm512_castps_si512(_mm512_set1_ps(n % 2 ? 16.0f : 256.0f));
    /* (moved & mask) | exponent */
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(moved, mask, exponent, 0xea));
}

/* `count` numbers of a row: to every `rows`th place, and their sums. */
AVX512 INLINE void lay_out_numbers(const int bits, float *place, const uint16_t *x, size_t count,
                                   const int rows) {
    const int codes = 32 / bits;
    float numbers[SPAN];
    __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
    for (size_t i = 0; i < count; i += 32) {
        __m512i value = load_numbers(x + i, count - i);
        even = _mm512_add_ps(even, even_places(value));
        odd = _mm512_add_ps(odd, odd_places(value));
        __m512i first = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(value));
        __m512i second = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(value, 1));
        _mm512_storeu_si512(numbers + i, _mm512_slli_epi32(first, 16));
        _mm512_storeu_si512(numbers + i + 16, _mm512_slli_epi32(second, 16));
    }
    float even_sum = _mm512_reduce_add_ps(even), odd_sum = _mm512_reduce_add_ps(odd);
    place[0] = bits == 4 ? -256.0f * odd_sum : 0.0f;
    place[rows] = bits == 4 ? -16.0f * even_sum : 0.0f;
    place[2 * rows] = even_sum + odd_sum;
    place += 3 * rows;
    size_t padded = words_of(bits, count) * codes;
    for (size_t i = 0; i < padded; i += codes)
        for (int j = 0; j < codes; j++) {
            float factor = bits == 8 && j < 3 ? 1.0f / (1 << 8 * j) : 1.0f;
            place[(i + j) * rows] = numbers[i + j] * factor;
        }
}

AVX512 INLINE void lay_out_spans(const int bits, float *packed, const uint16_t *x, size_t k,
                                 int num_rows, const Quant *quant) {
    int num_tiles = tiles_of(num_rows, QUANT_TILE_ROWS);
    size_t group = group_of(quant, k), count;
    for (size_t first = 0; first < k; first += count) {
        count = span_length(first, group, k);
        const uint16_t *from = x + first;
        for (int tile = 0; tile < num_tiles; tile++) {
            int rows = rows_of_tile(num_rows, num_tiles, tile);
            for (int t = 0; t < rows; t++, from += k)
                switch (rows) {
                case 1: lay_out_numbers(bits, packed + t, from, count, 1); break;
                case 2: lay_out_numbers(bits, packed + t, from, count, 2); break;
                default: lay_out_numbers(bits, packed + t, from, count, rows);
                }
            packed += (words_of(bits, count) * (32 / bits) + 3) * rows;
        }
    }
}

AVX512 static void lay_out_quantized_avx512(void *packed, const uint16_t *x, size_t k, int num_rows,
                                            const Quant *quant) {
    if (quant->bits == 4)
        lay_out_spans(4, packed, x, k, num_rows, quant);
    else
        lay_out_spans(8, packed, x, k, num_rows, quant);
}

/* A span for several tiles: [weights, in the order of `code_at`][BLOCK]. */
AVX512 INLINE void decode_span(const int bits, float *decoded, const QuantSpan *span) {
    const uint32_t *words = span->words;
    const char *ahead = span->ahead;
    for (int step = 0; step < span->steps; step++, words += BLOCK, ahead += 128) {
        ask(ahead);
        ask(ahead + 64);
#pragma GCC unroll 8
        for (int n = 0; n < 32 / bits; n++, decoded += BLOCK)
            for (int v = 0; v < ZMMS_OF_BLOCK; v++)
                _mm512_store_ps(decoded + v * ZMM_LANES,
                                decode(bits, n, _mm512_loadu_si512(words + v * ZMM_LANES)));
    }
}

/* `rows` of x against the outputs of a panel; `decoded`: the span, or NULL. */
AVX512 INLINE void tile_span(const int bits, const int rows, float *results, const QuantSpan *span,
                             const float *decoded, const float *x) {
    const float *sums_of_x = x + 2 * rows;
    __m512 sums[QUANT_TILE_ROWS][ZMMS_OF_BLOCK][2];
    for (int t = 0; t < rows; t++)
        for (int v = 0; v < ZMMS_OF_BLOCK; v++)
            for (int n = 0; n < 2; n++) sums[t][v][n] = _mm512_set1_ps(x[n * rows + t]);
    x += 3 * rows;
    const uint32_t *words = span->words;
    const char *ahead = span->ahead;
    for (int step = 0; step < span->steps; step++, words += BLOCK, ahead += 128) {
        if (!decoded) {
            ask(ahead);
            ask(ahead + 64);
        }
#pragma GCC unroll 8
        for (int n = 0; n < 32 / bits; n++) {
            __m512 numbers[ZMMS_OF_BLOCK];
            for (int v = 0; v < ZMMS_OF_BLOCK; v++)
                if (decoded) {
                    numbers[v] = _mm512_load_ps(decoded);
                    decoded += ZMM_LANES;
                } else {
                    numbers[v] = decode(bits, n, _mm512_loadu_si512(words + v * ZMM_LANES));
                }
            for (int t = 0; t < rows; t++) {
                __m512 value = _mm512_set1_ps(x[code_at(bits, n) * rows + t]);
                for (int v = 0; v < ZMMS_OF_BLOCK; v++)
                    sums[t][v][n % 2] = _mm512_fmadd_ps(numbers[v], value, sums[t][v][n % 2]);
            }
        }
        x += 32 / bits * rows;
    }
    for (int v = 0; v < ZMMS_OF_BLOCK; v++) {
        const int first = v * ZMM_LANES;
        __m256i half = _mm256_loadu_si256((const __m256i *)(span->scales + first));
        __m512i whole = _mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
        __m512 scale = _mm512_castsi512_ps(whole), zero = _mm512_set1_ps(1 << (bits - 1));
        if (span->zeros) {
            __m128i bytes = _mm_loadu_si128((const __m128i *)(span->zeros + first));
            zero = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
        }
        for (int t = 0; t < rows; t++) {
            float *result = results + t * BLOCK_STRIDE + first;
            __m512 sum = _mm512_add_ps(sums[t][v][0], sums[t][v][1]);
            sum = _mm512_fnmadd_ps(zero, _mm512_set1_ps(sums_of_x[t]), sum);
            _mm512_storeu_ps(result, _mm512_fmadd_ps(scale, sum, _mm512_loadu_ps(result)));
        }
    }
}

AVX512 INLINE void rows_span(const int bits, int rows, float *results, const QuantSpan *span,
                             const float *decoded, const float *x) {
    switch (rows) {
    case 1: tile_span(bits, 1, results, span, decoded, x); break;
    case 2: tile_span(bits, 2, results, span, decoded, x); break;
    case 3: tile_span(bits, 3, results, span, decoded, x); break;
    case 4: tile_span(bits, 4, results, span, decoded, x); break;
    case 5: tile_span(bits, 5, results, span, decoded, x); break;
    default: tile_span(bits, 6, results, span, decoded, x);
    }
}

AVX512 INLINE void panel_spans(const int bits, float *results, const char *start, size_t k,
                               const float *x, int num_rows, const char *next,
                               const Quant *quant) {
    _Alignas(64) float decoded[SPAN * BLOCK];
    int num_tiles = tiles_of(num_rows, QUANT_TILE_ROWS);
    size_t group = group_of(quant, k), count;
    Panel panel = open_panel(start, k, next, quant);
    QuantSpan span = {0};
    for (int row = 0; row < num_rows; row++)
        memset(results + row * BLOCK_STRIDE, 0, BLOCK * sizeof(float));
    for (size_t first = 0; first < k; first += count) {
        count = span_length(first, group, k);
        span = take_span(bits, &panel, span, count, first % group == 0, quant);
        size_t numbers_of_row = (size_t)span.steps * (32 / bits) + 3;
        if (num_tiles == 1) {
            rows_span(bits, num_rows, results, &span, NULL, x);
            x += numbers_of_row * num_rows;
            continue;
        }
        float *target = results;
        decode_span(bits, decoded, &span);
        for (int tile = 0; tile < num_tiles; tile++) {
            int rows = rows_of_tile(num_rows, num_tiles, tile);
            rows_span(bits, rows, target, &span, decoded, x);
            target += rows * BLOCK_STRIDE;
            x += numbers_of_row * rows;
        }
    }
}

AVX512 static void dots_quantized_avx512(float *results, const char *panel, size_t k,
                                         const void *packed, int num_rows, const char *next,
                                         const Quant *quant) {
    if (quant->bits == 4)
        panel_spans(4, results, panel, k, packed, num_rows, next, quant);
    else
        panel_spans(8, results, panel, k, packed, num_rows, next, quant);
}

/* All but products of weights in bfloat16. */
#define AVX512_FUNCTIONS                                                                           \
    lay_out_quantized_avx512, dots_quantized_avx512,                                               \
    {swiglu_avx512, geglu_avx512}, store_bf16_avx512, store_f32_avx512, combine_avx512,            \
    choose_avx512,                                                                                 \
    route_avx512, norm_avx512, rotate_avx512, attend_avx512, store_attention_avx512

static const Kernels AVX512_KERNELS = {
    AVX512_TILE_ROWS, AVX512_STEP, sizeof(float), lay_out_avx512, dots_avx512, AVX512_FUNCTIONS
};

#if HAS_AVX512_BF16

/* ---- AVX-512-BF16: 32 products an instruction ------------------------------------------------ */

#define AVX512_BF16                                                                                \
    __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))
#define AVX512_BF16_TILE_ROWS 6

AVX512_BF16 static void lay_out_avx512_bf16(void *packed, const uint16_t *x, size_t k, int num_rows) {
    uint16_t *target = packed;
    int num_tiles = tiles_of(num_rows, AVX512_BF16_TILE_ROWS);
    for (int tile = 0; tile < num_tiles; tile++) {
        int rows = rows_of_tile(num_rows, num_tiles, tile);
        for (int row = 0; row < rows; row++, x += k) {
            for (size_t i = 0; i < k; i += AVX512_STEP) {
                size_t left = k - i;
                __mmask32 mask = left < AVX512_STEP ? (1u << left) - 1 : ~0u;
                __m512i value = _mm512_maskz_loadu_epi16(mask, x + i);
                _mm512_storeu_si512(target + (i / AVX512_STEP * rows + row) * AVX512_STEP, value);
            }
        }
        target += round_up(k, AVX512_STEP) * rows;
    }
}

AVX512_BF16 INLINE void step_avx512_bf16(const int rows, __m512 sums[][TILE_OUTPUTS], const __m512i *weights,
                               const uint16_t *x) {
    for (int t = 0; t < rows; t++) {
        __m512bh value = (__m512bh)_mm512_loadu_si512(x + t * AVX512_STEP);
        for (int o = 0; o < TILE_OUTPUTS; o++)
            sums[t][o] = _mm512_dpbf16_ps(sums[t][o], (__m512bh)weights[o], value);
    }
}

AVX512_BF16 INLINE void tile_avx512_bf16(const int rows, const int num_ahead, float *results,
                               const uint16_t *w, size_t k, int valid, const uint16_t *x,
                               const uint16_t *ahead) {
    const uint16_t *from[TILE_OUTPUTS];
    for (int o = 0; o < TILE_OUTPUTS; o++) from[o] = w + (size_t)(o < valid ? o : valid - 1) * k;
    __m512 sums[AVX512_BF16_TILE_ROWS][TILE_OUTPUTS];
    for (int t = 0; t < rows; t++)
        for (int o = 0; o < TILE_OUTPUTS; o++) sums[t][o] = _mm512_setzero_ps();
    __m512i weights[TILE_OUTPUTS];
    size_t i = 0;
    for (; i + AVX512_STEP <= k; i += AVX512_STEP, x += AVX512_STEP * rows) {
        ask_for(ahead, num_ahead, k, i);
        for (int o = 0; o < TILE_OUTPUTS; o++) weights[o] = _mm512_loadu_si512(from[o] + i);
        step_avx512_bf16(rows, sums, weights, x);
    }
    if (i < k) {
        __mmask32 mask = (1u << (k - i)) - 1;
        for (int o = 0; o < TILE_OUTPUTS; o++)
            weights[o] = _mm512_maskz_loadu_epi16(mask, from[o] + i);
        step_avx512_bf16(rows, sums, weights, x);
    }
    for (int t = 0; t < rows; t++)
        _mm_storeu_ps(results + t * BLOCK_STRIDE,
                      sum_lanes(sums[t][0], sums[t][1], sums[t][2], sums[t][3]));
}

DOTS(avx512_bf16, AVX512_BF16, uint16_t, AVX512_STEP, AVX512_BF16_TILE_ROWS,
     TILE(tile_avx512_bf16, 1) TILE(tile_avx512_bf16, 2) TILE(tile_avx512_bf16, 3)
     TILE(tile_avx512_bf16, 4) TILE(tile_avx512_bf16, 5) TILE(tile_avx512_bf16, 6))
static const Kernels AVX512_BF16_KERNELS = {
    AVX512_BF16_TILE_ROWS, AVX512_STEP, sizeof(uint16_t), lay_out_avx512_bf16, dots_avx512_bf16,
    AVX512_FUNCTIONS
};

#endif /* HAS_AVX512_BF16 */
#endif /* HAS_X86 */

/* ---- which instruction set ------------------------------------------------------------------- */

EXPORT int oled_abi_version(void) { return ABI_VERSION; }

EXPORT uint64_t oled_source_id(void) { return SOURCE_ID; }

/* Non-zero where this processor, and this build, can run `isa`. */
EXPORT int oled_has_isa(int isa) {
    if (isa == ISA_GENERIC) return 1;
#if HAS_X86
    __builtin_cpu_init();
    int has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (isa == ISA_AVX2) return has_avx2;
    int has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                     __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                     __builtin_cpu_supports("avx512dq");
    if (isa == ISA_AVX512) return has_avx512;
#endif
#if HAS_AVX512_BF16
    if (isa == ISA_AVX512_BF16) return has_avx512 && __builtin_cpu_supports("avx512bf16");
#endif
    return 0;
}

/* The fastest here. Intel's processors take a pair of products in bfloat16 for four times the work
 * of one in fp32. */
EXPORT int oled_best_isa(void) {
#if HAS_X86
    if (oled_has_isa(ISA_AVX512_BF16) && !__builtin_cpu_is("intel")) return ISA_AVX512_BF16;
    if (oled_has_isa(ISA_AVX512)) return ISA_AVX512;
    if (oled_has_isa(ISA_AVX2)) return ISA_AVX2;
#endif
    return ISA_GENERIC;
}

static const Kernels *kernels_of(int isa) {
    if (!oled_has_isa(isa)) return NULL;
#if HAS_AVX512_BF16
    if (isa == ISA_AVX512_BF16) return &AVX512_BF16_KERNELS;
#endif
#if HAS_X86
    if (isa == ISA_AVX512) return &AVX512_KERNELS;
    if (isa == ISA_AVX2) return &AVX2_KERNELS;
#endif
    return &GENERIC;
}

/* ---- jobs: tasks by number, taken from one counter ------------------------------------------- */

/* What a thread has for itself while it is at a job. `packed_from` says which rows are laid out. */
typedef struct {
    const uint16_t *packed_from;
    float *first, *second; /* results of a block, [MAX_ROWS][BLOCK_STRIDE] */
    void *packed;
} Scratch;

typedef struct Job Job;
struct Job {
    void (*run)(Job *job, int64_t task, Scratch *scratch);
    const Kernels *kernels;
    int64_t num_tasks;
    int max_rows; /* laid out at once */
    size_t row_bytes; /* of the longest row, laid out */
    _Atomic int64_t next_task;
};

static struct {
    pthread_mutex_t owner; /* held by the call that uses the workers and the memory */
    char *memory;
    size_t memory_bytes;

    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t wake, done;
    pthread_t workers[MAX_THREADS];
    int num_workers, num_sleeping;
    int caller_cpu; /* which workers keep off */
    int num_wanted; /* workers that may still join the job */
    Job *job;
    char *scratch;
    _Atomic int num_inside; /* workers that are at the job */
    _Atomic uint64_t generation;
} pool = {
    .owner = PTHREAD_MUTEX_INITIALIZER,
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .wake = PTHREAD_COND_INITIALIZER,
    .done = PTHREAD_COND_INITIALIZER,
};

INLINE void relax(void) {
#if HAS_X86
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static size_t row_bytes(const Kernels *kernels, size_t k) {
    return round_up(k, kernels->step) * kernels->element_bytes;
}

static size_t results_bytes(const Job *job) {
    return round_up((size_t)job->max_rows * BLOCK_STRIDE * sizeof(float), 64);
}

static size_t scratch_bytes(const Job *job) {
    /* A page more, so that no two threads share one. */
    return 2 * results_bytes(job) + round_up(job->max_rows * job->row_bytes, 4096) + 4096;
}

/* Numbers too small for an exponent count as zero here: they change nothing that bfloat16 can tell, and
 * x86 processors are slow with them (products of int8 took 1.6 times as long where some occurred). */
#if HAS_X86
static unsigned flush_tiny(void) {
    unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);
    return before;
}

static void restore_tiny(unsigned before) { _mm_setcsr(before); }
#else
static unsigned flush_tiny(void) { return 0; }
static void restore_tiny(unsigned before) { (void)before; }
#endif

static void work(Job *job, char *memory) {
    unsigned before = flush_tiny();
    Scratch scratch = {
        .first = (float *)memory,
        .second = (float *)(memory + results_bytes(job)),
        .packed = memory + 2 * results_bytes(job),
    };
    for (;;) {
        int64_t task = atomic_fetch_add_explicit(&job->next_task, 1, memory_order_relaxed);
        if (task >= job->num_tasks) break;
        job->run(job, task, &scratch);
    }
    restore_tiny(before);
}

/* Spins a moment for the next job: layers follow one another closely, and to wake a thread takes as
 * long as a small product. After SPIN_NS whoever else wants the core gets it. */
static void spin_for_job(uint64_t seen) {
    int64_t start = now_ns(), passed = 0;
    do {
        for (int i = 0; i < 64; i++) {
            if (atomic_load_explicit(&pool.generation, memory_order_relaxed) != seen) return;
            relax();
        }
        if (passed > SPIN_NS) sched_yield();
        passed = now_ns() - start;
    } while (passed < YIELD_NS);
}

static void *worker(void *unused) {
    uint64_t seen = 0;
    for (;;) {
        pthread_mutex_lock(&pool.lock);
        while (pool.generation == seen) {
            pool.num_sleeping++;
            pthread_cond_wait(&pool.wake, &pool.lock);
            pool.num_sleeping--;
        }
        seen = pool.generation;
        Job *job = pool.num_wanted > 0 ? pool.job : NULL;
        char *scratch = NULL;
        if (job) {
            scratch = pool.scratch + (size_t)pool.num_wanted * scratch_bytes(job);
            pool.num_wanted--;
            pool.num_inside++;
        }
        pthread_mutex_unlock(&pool.lock);
        if (job) {
            work(job, scratch);
            pthread_mutex_lock(&pool.lock);
            if (--pool.num_inside == 0) pthread_cond_signal(&pool.done);
            pthread_mutex_unlock(&pool.lock);
        }
        spin_for_job(seen);
    }
    return unused;
}

/* A child process has none of its parent's threads. */
static void forget_workers(void) {
    pthread_mutex_init(&pool.owner, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pthread_cond_init(&pool.done, NULL);
    pool.num_workers = pool.num_sleeping = pool.num_wanted = 0;
    pool.num_inside = 0;
    pool.job = NULL;
}

static void prepare_pool(void) { pthread_atfork(NULL, NULL, forget_workers); }

/* Keeps workers off the processor that the caller is on, as far as there are others. The scheduler
 * likes to wake a worker right there when the rest is busy with unimportant work, and then the
 * caller waits: for milliseconds, where a call takes one. */
static void move_workers(void) {
#ifdef __linux__
    int here = sched_getcpu();
    cpu_set_t allowed;
    if (here < 0 || here == pool.caller_cpu) return;
    if (pthread_getaffinity_np(pthread_self(), sizeof allowed, &allowed)) return;
    pool.caller_cpu = here;
    CPU_CLR(here, &allowed);
    for (int i = 0; i < pool.num_workers && CPU_COUNT(&allowed); i++)
        pthread_setaffinity_np(pool.workers[i], sizeof allowed, &allowed);
#endif
}

/* Workers handle no signals: those are for the interpreter's main thread. */
static void start_workers(int num_workers) {
    sigset_t all, before;
    sigfillset(&all);
    if (pthread_sigmask(SIG_SETMASK, &all, &before)) return;
    while (pool.num_workers < num_workers) {
        pthread_t *thread = &pool.workers[pool.num_workers];
        if (pthread_create(thread, NULL, worker, NULL)) break;
        pthread_detach(*thread);
        pool.num_workers++;
        pool.caller_cpu = -1;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void share(Job *job, char *scratch, int num_threads) {
    pthread_mutex_lock(&pool.lock);
    start_workers(num_threads - 1);
    move_workers();
    pool.job = job;
    pool.scratch = scratch;
    pool.num_wanted = num_threads - 1;
    pool.generation++;
    for (int i = 0; i < pool.num_sleeping && i < num_threads - 1; i++)
        pthread_cond_signal(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
}

static void withdraw(void) {
    pthread_mutex_lock(&pool.lock);
    pool.job = NULL;
    pthread_mutex_unlock(&pool.lock);
    /* Who is still inside is at its last task: rarely worth a sleep. */
    int64_t end = now_ns() + 2 * SPIN_NS;
    while (pool.num_inside && now_ns() < end) relax();
    pthread_mutex_lock(&pool.lock);
    while (pool.num_inside) pthread_cond_wait(&pool.done, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
}

static void perform(Job *job, char *scratch, int num_threads) {
    job->next_task = 0;
    if (num_threads > job->num_tasks) num_threads = (int)job->num_tasks;
    if (num_threads > 1) share(job, scratch, num_threads);
    work(job, scratch);
    if (num_threads > 1) withdraw();
}

/* ---- memory of a call ------------------------------------------------------------------------ */

typedef struct {
    char *memory;
    int num_threads;
    int owns_pool;
} Call;

/* The pool and its memory, or, while another call has them, memory of this call's own and one
 * thread: results do not depend on it. */
static int begin_call(Call *call, int num_threads, size_t bytes_per_thread, size_t shared_bytes) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, prepare_pool);
    call->num_threads = num_threads < 1 ? 1 : num_threads > MAX_THREADS ? MAX_THREADS : num_threads;
    call->owns_pool = pthread_mutex_trylock(&pool.owner) == 0;
    if (!call->owns_pool) call->num_threads = 1;
    size_t bytes = round_up(call->num_threads * bytes_per_thread + shared_bytes, 4096);
    if (!call->owns_pool) {
        call->memory = aligned_alloc(4096, bytes);
        return call->memory ? ERROR_NONE : ERROR_MEMORY;
    }
    if (bytes > pool.memory_bytes) {
        char *memory = aligned_alloc(4096, bytes);
        if (!memory) {
            pthread_mutex_unlock(&pool.owner);
            return ERROR_MEMORY;
        }
        free(pool.memory);
        pool.memory = memory;
        pool.memory_bytes = bytes;
    }
    call->memory = pool.memory;
    return ERROR_NONE;
}

static void end_call(Call *call) {
    if (call->owns_pool)
        pthread_mutex_unlock(&pool.owner);
    else
        free(call->memory);
}

/* Outputs of a task: whole blocks of weights of `block_bytes` each. `total_bytes` of weights are read
 * in the call, for `num_rows` rows each; with many rows little weight is much work. */
static int64_t outputs_of_task(size_t block_bytes, int64_t num_outputs, int64_t total_bytes,
                               int64_t num_rows, int num_threads) {
    int64_t bytes = total_bytes / (num_threads > 0 ? num_threads : 1) / TASKS_PER_THREAD;
    int64_t least = MIN_TASK_BYTES / (num_rows / ROWS_OF_A_READ + 1);
    if (bytes < least) bytes = least;
    if (bytes > MAX_TASK_BYTES) bytes = MAX_TASK_BYTES;
    int64_t wanted = bytes / (int64_t)block_bytes * BLOCK;
    if (wanted < BLOCK) wanted = BLOCK;
    return wanted < num_outputs ? wanted : (int64_t)round_up((size_t)num_outputs, BLOCK);
}

static int64_t tasks_of(int64_t num_outputs, int64_t outputs_of_task) {
    return (num_outputs + outputs_of_task - 1) / outputs_of_task;
}

static void lay_out(const Job *job, Scratch *scratch, const uint16_t *x, size_t k, int num_rows) {
    if (scratch->packed_from == x) return;
    job->kernels->lay_out(scratch->packed, x, k, num_rows);
    scratch->packed_from = x;
}

/* ---- one matrix ------------------------------------------------------------------------------ */

typedef struct {
    Job job;
    const uint16_t *w, *x, *bias;
    void *out;
    int64_t num_rows, num_outputs, task_rows, task_outputs, num_parts;
    size_t k;
    int is_f32;
} Linear;

static void run_linear(Job *job, int64_t task, Scratch *scratch) {
    const Linear *p = (const Linear *)job;
    const Kernels *kernels = job->kernels;
    int64_t first = task % p->num_parts * p->task_outputs;
    int64_t end = smaller(first + p->task_outputs, p->num_outputs);
    int64_t first_row = task / p->num_parts * p->task_rows;
    int64_t end_row = smaller(first_row + p->task_rows, p->num_rows);
    for (int64_t row = first_row; row < end_row; row += MAX_ROWS) {
        int num_rows = (int)smaller(MAX_ROWS, end_row - row);
        lay_out(job, scratch, p->x + row * p->k, p->k, num_rows);
        for (int64_t o = first; o < end; o += BLOCK) {
            int count = (int)smaller(BLOCK, end - o);
            const uint16_t *w = p->w + o * p->k;
            const uint16_t *bias = p->bias ? p->bias + o : NULL;
            const uint16_t *next = o + BLOCK < end ? w + BLOCK * p->k : NULL;
            int64_t place = row * p->num_outputs + o;
            kernels->dots(scratch->first, w, p->k, count, scratch->packed, num_rows, next);
            if (p->is_f32)
                kernels->store_f32((float *)p->out + place, p->num_outputs, scratch->first, bias,
                                   num_rows, count);
            else
                kernels->store_bf16((uint16_t *)p->out + place, p->num_outputs, scratch->first,
                                    bias, num_rows, count);
        }
    }
}

/* out[r][o] = x[r]·w[o] + bias[o] for contiguous matrices; `out` is float where `is_f32`, else
 * bfloat16; `bias` may be NULL. Returns 0, or what is wrong. */
EXPORT int oled_linear(const void *w, const void *x, const void *bias, void *out, int64_t num_rows,
                       int64_t k, int64_t num_outputs, int is_f32, int isa, int num_threads) {
    const Kernels *kernels = kernels_of(isa);
    if (!kernels) return ERROR_ISA;
    if (num_rows <= 0 || num_outputs <= 0) return ERROR_NONE;
    int64_t total_bytes = 2 * k * num_outputs, task_rows = num_rows;
    if (total_bytes <= MAX_TASK_BYTES) {
        /* A cache holds the weights, so they may come again; what costs is to lay out all rows anew
         * for every few outputs. */
        int64_t num_tasks = (num_rows + MAX_ROWS - 1) / MAX_ROWS;
        task_rows = (num_rows + num_tasks - 1) / num_tasks;
    }
    Linear linear = {
        .job = {run_linear, kernels, 0, (int)smaller(MAX_ROWS, num_rows),
                row_bytes(kernels, (size_t)k), 0},
        .w = w, .x = x, .bias = bias, .out = out,
        .num_rows = num_rows, .num_outputs = num_outputs, .task_rows = task_rows,
        .task_outputs = outputs_of_task(BLOCK * (size_t)k * sizeof(uint16_t), num_outputs,
                                        total_bytes, task_rows, num_threads),
        .k = (size_t)k, .is_f32 = is_f32,
    };
    linear.num_parts = tasks_of(num_outputs, linear.task_outputs);
    linear.job.num_tasks = linear.num_parts * tasks_of(num_rows, task_rows);
    Call call;
    int error = begin_call(&call, num_threads, scratch_bytes(&linear.job), 0);
    if (error) return error;
    perform(&linear.job, call.memory, call.num_threads);
    end_call(&call);
    return ERROR_NONE;
}

/* ---- many experts ---------------------------------------------------------------------------- */

typedef struct {
    const char *gate, *up, *down;
    const uint16_t *x;
    uint16_t *hidden, *out;
    int64_t num_rows;
    _Atomic int64_t num_done; /* tasks of the first half */
} Expert;

/* A round of experts. First all `first_tasks` of expert 0, then in turn those of expert i + 1 and
 * the `second_tasks` of expert i, so that who comes to the second half of an expert finds its first
 * half done, or nearly. */
typedef struct {
    Job job;
    Expert *experts;
    int64_t num_experts, first_tasks, second_tasks, first_outputs, second_outputs;
    size_t hidden_size, intermediate_size;
    int activation;
    Quant quant;
} Experts;

/* Bytes of the weights of BLOCK outputs. */
static size_t block_bytes(const Quant *quant, size_t k) {
    return quant->bits ? panel_bytes(quant, k) : BLOCK * k * sizeof(uint16_t);
}

/* Bytes of a matrix, of which the last block is whole where it is quantised. */
static size_t weights_bytes(const Quant *quant, int64_t num_outputs, size_t k) {
    if (!quant->bits) return (size_t)num_outputs * k * sizeof(uint16_t);
    return (size_t)tasks_of(num_outputs, BLOCK) * panel_bytes(quant, k);
}

static void lay_out_rows(const Experts *p, Scratch *scratch, const uint16_t *x, size_t k,
                         int num_rows) {
    if (!p->quant.bits) {
        lay_out(&p->job, scratch, x, k, num_rows);
    } else if (scratch->packed_from != x) {
        p->job.kernels->lay_out_quantized(scratch->packed, x, k, num_rows, &p->quant);
        scratch->packed_from = x;
    }
}

/* Up to BLOCK outputs, whose weights begin at `w`, for the rows laid out. */
static void block_dots(const Experts *p, float *results, const char *w, size_t k, int num_outputs,
                       const Scratch *scratch, int num_rows, const char *next) {
    if (p->quant.bits)
        p->job.kernels->dots_quantized(results, w, k, scratch->packed, num_rows, next, &p->quant);
    else
        p->job.kernels->dots(results, (const uint16_t *)w, k, num_outputs, scratch->packed,
                             num_rows, (const uint16_t *)next);
}

static void run_gate_up(const Experts *p, Expert *expert, int64_t chunk, Scratch *scratch) {
    const Kernels *kernels = p->job.kernels;
    size_t k = p->hidden_size;
    int64_t width = (int64_t)p->intermediate_size, first = chunk * p->first_outputs;
    int64_t end = smaller(first + p->first_outputs, width);
    size_t bytes = block_bytes(&p->quant, k);
    for (int64_t row = 0; row < expert->num_rows; row += MAX_ROWS) {
        int num_rows = (int)smaller(MAX_ROWS, expert->num_rows - row);
        lay_out_rows(p, scratch, expert->x + row * k, k, num_rows);
        for (int64_t o = first; o < end; o += BLOCK) {
            int count = (int)smaller(BLOCK, end - o);
            const char *gate = expert->gate + (size_t)(o / BLOCK) * bytes;
            const char *up = expert->up + (size_t)(o / BLOCK) * bytes;
            const char *next = o + BLOCK < end ? gate + bytes : NULL;
            block_dots(p, scratch->first, gate, k, count, scratch, num_rows, up);
            block_dots(p, scratch->second, up, k, count, scratch, num_rows, next);
            kernels->gated[p->activation](expert->hidden + row * width + o, width, scratch->first,
                                          scratch->second, num_rows, count);
        }
    }
    atomic_fetch_add_explicit(&expert->num_done, 1, memory_order_release);
}

static void run_down(const Experts *p, Expert *expert, int64_t chunk, Scratch *scratch) {
    /* The tasks waited for have lower numbers, so some thread is at them. */
    for (int i = 0; atomic_load_explicit(&expert->num_done, memory_order_acquire) < p->first_tasks;
         i++) {
        relax();
        if (i % 512 == 511) sched_yield();
    }
    const Kernels *kernels = p->job.kernels;
    size_t k = p->intermediate_size;
    int64_t width = (int64_t)p->hidden_size, first = chunk * p->second_outputs;
    int64_t end = smaller(first + p->second_outputs, width);
    size_t bytes = block_bytes(&p->quant, k);
    for (int64_t row = 0; row < expert->num_rows; row += MAX_ROWS) {
        int num_rows = (int)smaller(MAX_ROWS, expert->num_rows - row);
        lay_out_rows(p, scratch, expert->hidden + row * k, k, num_rows);
        for (int64_t o = first; o < end; o += BLOCK) {
            int count = (int)smaller(BLOCK, end - o);
            const char *down = expert->down + (size_t)(o / BLOCK) * bytes;
            const char *next = o + BLOCK < end ? down + bytes : NULL;
            block_dots(p, scratch->first, down, k, count, scratch, num_rows, next);
            kernels->store_bf16(expert->out + row * width + o, width, scratch->first, NULL,
                                num_rows, count);
        }
    }
}

static void run_experts(Job *job, int64_t task, Scratch *scratch) {
    const Experts *p = (const Experts *)job;
    if (task < p->first_tasks) {
        run_gate_up(p, &p->experts[0], task, scratch);
        return;
    }
    task -= p->first_tasks;
    int64_t turn = task / (p->first_tasks + p->second_tasks);
    int64_t place = task % (p->first_tasks + p->second_tasks);
    int64_t num_first = turn + 1 < p->num_experts ? p->first_tasks : 0;
    if (place < num_first)
        run_gate_up(p, &p->experts[turn + 1], place, scratch);
    else
        run_down(p, &p->experts[turn], place - num_first, scratch);
}

static int64_t hidden_bytes(int64_t num_rows, size_t intermediate_size) {
    return num_rows * (int64_t)intermediate_size * (int64_t)sizeof(uint16_t);
}

/* For each group g: out[starts[g]:ends[g]] = the gated MLP of x[starts[g]:ends[g]] with the expert
 * in slot slots[g]; `activation` of the gate: 0 SiLU, 1 GELU. x and out are contiguous [N, D], not
 * the same memory; ranges are disjoint. A slot holds gate [F, D] and up [F, D] at its start and
 * down [D, F] at `down_offset`: bfloat16 where `bits` is 0, else quantised. Returns 0, or what is
 * wrong. */
EXPORT int oled_experts(const void *arena, int64_t slot_bytes, int64_t down_offset, int64_t hidden,
                        int64_t intermediate, int activation, int bits, int64_t group,
                        int has_zeros, const void *x, void *out, int64_t num_groups,
                        const int64_t *slots, const int64_t *starts, const int64_t *ends, int isa,
                        int num_threads) {
    const Kernels *kernels = kernels_of(isa);
    if (!kernels || (bits != 0 && bits != 4 && bits != 8)) return ERROR_ISA;
    Quant quant = {bits, has_zeros, group};
    size_t up_offset = weights_bytes(&quant, intermediate, (size_t)hidden);
    int64_t expert_bytes =
        2 * (int64_t)up_offset + (int64_t)weights_bytes(&quant, hidden, (size_t)intermediate);
    size_t longest = (size_t)(hidden > intermediate ? hidden : intermediate);
    int64_t max_rows = 0, total_rows = 0, total_bytes = 0, num_used = 0;
    for (int64_t g = 0; g < num_groups; g++) {
        int64_t num_rows = ends[g] - starts[g];
        if (num_rows > 0) total_bytes += expert_bytes, num_used++;
        if (num_rows > max_rows) max_rows = num_rows;
        total_rows += num_rows > 0 ? num_rows : 0;
    }
    if (!total_rows) return ERROR_NONE;
    int64_t rows_each = total_rows / num_used;
    Experts round = {
        .job = {run_experts, kernels, 0, (int)smaller(MAX_ROWS, max_rows),
                bits ? quantized_row_bytes(&quant, longest) : row_bytes(kernels, longest), 0},
        .first_outputs = outputs_of_task(2 * block_bytes(&quant, (size_t)hidden), intermediate,
                                         total_bytes, rows_each, num_threads),
        .second_outputs = outputs_of_task(block_bytes(&quant, (size_t)intermediate), hidden,
                                          total_bytes, rows_each, num_threads),
        .hidden_size = (size_t)hidden, .intermediate_size = (size_t)intermediate,
        .activation = activation,
        .quant = quant,
    };
    round.first_tasks = tasks_of(intermediate, round.first_outputs);
    round.second_tasks = tasks_of(hidden, round.second_outputs);
    int64_t room = hidden_bytes(max_rows, intermediate);
    if (room < MAX_HIDDEN_BYTES) room = MAX_HIDDEN_BYTES;
    room = smaller(room, hidden_bytes(total_rows, intermediate));
    size_t experts_bytes = round_up((size_t)num_groups * sizeof(Expert), 4096);
    Call call;
    size_t bytes_per_thread = scratch_bytes(&round.job);
    int error = begin_call(&call, num_threads, bytes_per_thread, experts_bytes + (size_t)room);
    if (error) return error;
    round.experts = (Expert *)(call.memory + call.num_threads * bytes_per_thread);
    uint16_t *hidden_rows = (uint16_t *)((char *)round.experts + experts_bytes);
    for (int64_t g = 0; g < num_groups;) {
        int64_t rows_of_round = 0;
        for (round.num_experts = 0; g < num_groups; g++) {
            int64_t num_rows = ends[g] - starts[g];
            if (num_rows <= 0) continue;
            if (hidden_bytes(rows_of_round + num_rows, intermediate) > room) break;
            const char *slot = (const char *)arena + slots[g] * slot_bytes;
            Expert *expert = &round.experts[round.num_experts++];
            expert->gate = slot;
            expert->up = slot + up_offset;
            expert->down = slot + down_offset;
            expert->x = (const uint16_t *)x + starts[g] * hidden;
            expert->out = (uint16_t *)out + starts[g] * hidden;
            expert->hidden = hidden_rows + rows_of_round * intermediate;
            expert->num_rows = num_rows;
            expert->num_done = 0;
            rows_of_round += num_rows;
        }
        if (!round.num_experts) break;
        round.job.num_tasks = round.num_experts * (round.first_tasks + round.second_tasks);
        perform(&round.job, call.memory, call.num_threads);
    }
    end_call(&call);
    return ERROR_NONE;
}

/* ---- what comes before and after products ---------------------------------------------------- */

#define TOKENS_OF_TASK 4

typedef struct {
    Job job;
    const uint16_t *rows;
    const int64_t *places;
    const float *weights;
    float *total;
    int64_t num_tokens;
    size_t width;
    int num_places;
} Combine;

static void run_combine(Job *job, int64_t task, Scratch *scratch) {
    (void)scratch;
    Combine *p = (Combine *)job;
    int64_t end = smaller((task + 1) * TOKENS_OF_TASK, p->num_tokens);
    for (int64_t t = task * TOKENS_OF_TASK; t < end; t++)
        job->kernels->combine(p->total + t * p->width, p->rows, p->width,
                              p->places + t * p->num_places, p->weights + t * p->num_places,
                              p->num_places);
}

/* total [T, D] = weighted sum of the `num_places` rows [N, D] of each token, in their order. */
EXPORT int oled_combine(const void *rows, const int64_t *places, const float *weights, float *total,
                        int64_t num_tokens, int64_t num_places, int64_t width, int isa,
                        int num_threads) {
    const Kernels *kernels = kernels_of(isa);
    if (!kernels) return ERROR_ISA;
    Combine combine = {
        .job = {run_combine, kernels, tasks_of(num_tokens, TOKENS_OF_TASK), 1, 1, 0},
        .rows = rows, .places = places, .weights = weights, .total = total,
        .num_tokens = num_tokens, .width = (size_t)width, .num_places = (int)num_places,
    };
    Call call;
    int error = begin_call(&call, num_threads, scratch_bytes(&combine.job), 0);
    if (error) return error;
    perform(&combine.job, call.memory, call.num_threads);
    end_call(&call);
    return ERROR_NONE;
}

typedef struct {
    Job job;
    const float *logits;
    int64_t num_logits, banned;
    int64_t *best;
    float *probabilities;
    _Atomic int num_bad;
} Choose;

static void run_choose(Job *job, int64_t task, Scratch *scratch) {
    (void)scratch;
    Choose *p = (Choose *)job;
    int is_finite = job->kernels->choose(p->logits + task * p->num_logits, (size_t)p->num_logits,
                                         (size_t)p->banned, p->best + task, p->probabilities + task);
    if (!is_finite) atomic_fetch_add(&p->num_bad, 1);
}

/* For each row of logits [N, V] the best but `banned` and its probability. Returns how many rows
 * hold numbers that are not finite, or what is wrong. */
EXPORT int oled_choose(const float *logits, int64_t num_rows, int64_t num_logits, int64_t banned,
                       int64_t *best, float *probabilities, int isa, int num_threads) {
    const Kernels *kernels = kernels_of(isa);
    if (!kernels) return ERROR_ISA;
    Choose choose = {
        .job = {run_choose, kernels, num_rows, 1, 1, 0}, .logits = logits,
        .num_logits = num_logits, .banned = banned, .best = best, .probabilities = probabilities,
    };
    Call call;
    int error = begin_call(&call, num_threads, scratch_bytes(&choose.job), 0);
    if (error) return error;
    perform(&choose.job, call.memory, call.num_threads);
    end_call(&call);
    return choose.num_bad;
}

typedef struct {
    Job job;
    const uint16_t *x, *cos, *sin;
    uint16_t *out;
    int64_t num_rows, num_heads, head_size, rotary_size, rows_of_task;
} Rotate;

static void run_rotate(Job *job, int64_t task, Scratch *scratch) {
    (void)scratch;
    Rotate *p = (Rotate *)job;
    int64_t end = smaller((task + 1) * p->rows_of_task, p->num_rows);
    int64_t width = p->num_heads * p->head_size;
    for (int64_t row = task * p->rows_of_task; row < end; row++)
        job->kernels->rotate(p->out + row * width, p->x + row * width,
                             p->cos + row * p->rotary_size, p->sin + row * p->rotary_size,
                             (size_t)p->num_heads, (size_t)p->head_size,
                             (size_t)p->rotary_size / 2);
}

/* Heads [T, N, H] in bfloat16, the first R dimensions of each turned; cos and sin [T, R], of which
 * both halves are the same. */
EXPORT int oled_rotate(const void *x, const void *cos, const void *sin, void *out, int64_t num_rows,
                       int64_t num_heads, int64_t head_size, int64_t rotary_size, int isa,
                       int num_threads) {
    const Kernels *kernels = kernels_of(isa);
    if (!kernels) return ERROR_ISA;
    int64_t rows_of_task = 1 + 16384 / (num_heads * head_size);
    Rotate rotate = {
        .job = {run_rotate, kernels, tasks_of(num_rows, rows_of_task), 1, 1, 0},
        .x = x, .cos = cos, .sin = sin, .out = out, .num_rows = num_rows, .num_heads = num_heads,
        .head_size = head_size, .rotary_size = rotary_size, .rows_of_task = rows_of_task,
    };
    Call call;
    int error = begin_call(&call, num_threads, scratch_bytes(&rotate.job), 0);
    if (error) return error;
    perform(&rotate.job, call.memory, call.num_threads);
    end_call(&call);
    return ERROR_NONE;
}

#define ROUTE_TASK_ROWS 8

typedef struct {
    Job job;
    Routing routing;
    const float *logits;
    float *scores, *weights;
    int64_t *ids, num_rows;
} Route;

static void run_route(Job *job, int64_t task, Scratch *scratch) {
    (void)scratch;
    Route *p = (Route *)job;
    int64_t end = smaller((task + 1) * ROUTE_TASK_ROWS, p->num_rows);
    int64_t num_experts = p->routing.num_experts, top_k = p->routing.top_k;
    for (int64_t row = task * ROUTE_TASK_ROWS; row < end; row++)
        job->kernels->route(&p->routing, p->logits + row * num_experts,
                            p->scores + row * num_experts, p->ids + row * top_k,
                            p->weights + row * top_k);
}

/* For each row of logits [N, E]: sigmoids [N, E], ids [N, K] and shares [N, K]; bias [E] or NULL. */
EXPORT int oled_route(const float *logits, const float *bias, float *scores, int64_t *ids,
                      float *weights, int64_t num_rows, int64_t num_experts, int64_t num_groups,
                      int64_t num_kept, int64_t top_k, int isa, int num_threads) {
    const Kernels *kernels = kernels_of(isa);
    if (!kernels || num_experts > MAX_ROUTED) return ERROR_ISA;
    Route route = {
        .job = {run_route, kernels, tasks_of(num_rows, ROUTE_TASK_ROWS), 1, 1, 0},
        .routing = {bias, num_experts, num_groups, num_kept, top_k},
        .logits = logits, .scores = scores, .weights = weights, .ids = ids, .num_rows = num_rows,
    };
    Call call;
    int error = begin_call(&call, num_threads, scratch_bytes(&route.job), 0);
    if (error) return error;
    perform(&route.job, call.memory, call.num_threads);
    end_call(&call);
    return ERROR_NONE;
}

typedef struct {
    Job job;
    const uint16_t *x, *weight;
    uint16_t *out;
    int64_t num_rows, num_weights, rows_of_task;
    size_t width;
    float eps;
} Norm;

static void run_norm(Job *job, int64_t task, Scratch *scratch) {
    (void)scratch;
    Norm *p = (Norm *)job;
    int64_t end = smaller((task + 1) * p->rows_of_task, p->num_rows);
    for (int64_t row = task * p->rows_of_task; row < end; row++)
        job->kernels->norm(p->out + row * p->width, p->x + row * p->width,
                           p->weight + row % p->num_weights * p->width, p->width, p->eps);
}

/* Root-mean-square norm of rows [N, D] in bfloat16; weights [W, D] take turns. */
EXPORT int oled_norm(const void *x, const void *weight, void *out, int64_t num_rows,
                     int64_t num_weights, int64_t width, float eps, int isa, int num_threads) {
    const Kernels *kernels = kernels_of(isa);
    if (!kernels) return ERROR_ISA;
    int64_t rows_of_task = 1 + 16384 / width;
    Norm norm = {
        .job = {run_norm, kernels, tasks_of(num_rows, rows_of_task), 1, 1, 0},
        .x = x, .weight = weight, .out = out, .num_rows = num_rows,
        .num_weights = num_weights, .rows_of_task = rows_of_task,
        .width = (size_t)width, .eps = eps,
    };
    Call call;
    int error = begin_call(&call, num_threads, scratch_bytes(&norm.job), 0);
    if (error) return error;
    perform(&norm.job, call.memory, call.num_threads);
    end_call(&call);
    return ERROR_NONE;
}

#define ATTENTION_ROWS 16

/* Consecutive tokens that see the same keys: those of one sequence. Filled in by native.py. */
typedef struct {
    int64_t keys, values; /* addresses */
    int64_t first_token, num_tokens, num_keys, head_stride;
} Segment;

typedef struct {
    Job job;
    const uint16_t *queries;
    uint16_t *out;
    const Segment *segments;
    int64_t num_queries, num_groups;
    size_t head_size;
    float scale;
} Attention;

/* How many tasks one key/value head of a segment is. */
INLINE int64_t tasks_of_head(const Attention *p, const Segment *segment) {
    return tasks_of(segment->num_tokens * (p->num_queries / p->num_groups), ATTENTION_ROWS);
}

/* Some rows of one key/value head: row r is token r / Q, query head r % Q, of Q heads a group. */
static void run_attention(Job *job, int64_t task, Scratch *scratch) {
    Attention *p = (Attention *)job;
    const Kernels *kernels = job->kernels;
    const Segment *segment = p->segments;
    for (; task >= p->num_groups * tasks_of_head(p, segment); segment++)
        task -= p->num_groups * tasks_of_head(p, segment);
    size_t size = p->head_size, stride = STATE_STRIDE(size);
    int64_t heads = p->num_queries / p->num_groups, tasks = tasks_of_head(p, segment);
    int64_t group = task / tasks, first = task % tasks * ATTENTION_ROWS;
    int num_rows = (int)smaller(ATTENTION_ROWS, segment->num_tokens * heads - first);
    uint16_t rows[ATTENTION_ROWS * MAX_HEAD_SIZE];
    float state[ATTENTION_ROWS * (2 + MAX_HEAD_SIZE)];
    int64_t places[ATTENTION_ROWS];
    for (int r = 0; r < num_rows; r++) {
        int64_t token = segment->first_token + (first + r) / heads;
        int64_t head = group * heads + (first + r) % heads;
        places[r] = (token * p->num_queries + head) * (int64_t)size;
        memcpy(rows + r * size, p->queries + places[r], size * sizeof(uint16_t));
        memset(state + r * stride, 0, stride * sizeof(float));
        state[r * stride] = -3.40282347e38f;
    }
    kernels->lay_out(scratch->packed, rows, size, num_rows);
    const uint16_t *keys = (const uint16_t *)(intptr_t)segment->keys;
    const uint16_t *values = (const uint16_t *)(intptr_t)segment->values;
    keys += group * segment->head_stride;
    values += group * segment->head_stride;
    for (int64_t key = 0; key < segment->num_keys; key += BLOCK) {
        int count = (int)smaller(BLOCK, segment->num_keys - key);
        kernels->dots(scratch->first, keys + key * size, size, count, scratch->packed, num_rows,
                      NULL);
        kernels->attend(state, scratch->first, values + key * size, size, p->scale, num_rows,
                        count);
    }
    for (int r = 0; r < num_rows; r++)
        kernels->store_attention(p->out + places[r], state + r * stride, size);
}

/* Put keys and values of tokens, [T, G, H] with a row every `key_stride` and `value_stride` numbers,
 * where their segments' caches [G, S, H] have their last `num_tokens` of `num_keys` positions. */
EXPORT void oled_store(const uint16_t *keys, const uint16_t *values, int64_t key_stride,
                       int64_t value_stride, const Segment *segments, int64_t num_segments,
                       int64_t num_groups, int64_t head_size) {
    size_t size = (size_t)head_size * sizeof(uint16_t);
    for (int64_t i = 0; i < num_segments; i++) {
        const Segment *s = segments + i;
        int64_t first = (s->num_keys - s->num_tokens) * head_size;
        for (int64_t group = 0; group < num_groups; group++) {
            uint16_t *to_keys = (uint16_t *)(intptr_t)s->keys + group * s->head_stride + first;
            uint16_t *to_values = (uint16_t *)(intptr_t)s->values + group * s->head_stride + first;
            for (int64_t token = 0; token < s->num_tokens; token++) {
                int64_t row = s->first_token + token;
                memcpy(to_keys + token * head_size, keys + row * key_stride + group * head_size,
                       size);
                memcpy(to_values + token * head_size,
                       values + row * value_stride + group * head_size, size);
            }
        }
    }
}

/* Every query sees every key of its segment. queries and out [T, Q, H]; keys and values of a segment
 * [G, S, H], from one head to the next `head_stride` numbers; query head q belongs to key head
 * q / (Q / G). */
EXPORT int oled_attention(const void *queries, void *out, const Segment *segments,
                          int64_t num_segments, int64_t num_queries, int64_t num_groups,
                          int64_t head_size, float scale, int isa, int num_threads) {
    const Kernels *kernels = kernels_of(isa);
    if (!kernels || head_size > MAX_HEAD_SIZE) return ERROR_ISA;
    Attention attention = {
        .job = {run_attention, kernels, 0, ATTENTION_ROWS, row_bytes(kernels, (size_t)head_size), 0},
        .queries = queries, .out = out, .segments = segments,
        .num_queries = num_queries, .num_groups = num_groups,
        .head_size = (size_t)head_size, .scale = scale,
    };
    for (int64_t i = 0; i < num_segments; i++)
        attention.job.num_tasks += num_groups * tasks_of_head(&attention, segments + i);
    Call call;
    int error = begin_call(&call, num_threads, scratch_bytes(&attention.job), 0);
    if (error) return error;
    perform(&attention.job, call.memory, call.num_threads);
    end_call(&call);
    return ERROR_NONE;
}

/* ---- a plain read ---------------------------------------------------------------------------- */

#define READ_TASK_BYTES (1024 * 1024)

typedef struct {
    Job job;
    const char *memory;
    int64_t num_bytes;
    _Atomic uint64_t sum;
} Read;

static void run_read(Job *job, int64_t task, Scratch *scratch) {
    (void)scratch;
    Read *p = (Read *)job;
    const char *memory = p->memory + task * READ_TASK_BYTES;
    int64_t left = p->num_bytes - task * READ_TASK_BYTES;
    int64_t size = left < READ_TASK_BYTES ? left : READ_TASK_BYTES;
    uint64_t sums[32] = {0};
    for (int64_t i = 0; i + (int64_t)sizeof sums <= size; i += sizeof sums) {
        uint64_t words[32];
        for (int j = 0; j < (int)sizeof sums; j += 64)
            __builtin_prefetch(memory + i + j + (i + AHEAD_BYTES < size ? AHEAD_BYTES : 0), 0, 3);
        memcpy(words, memory + i, sizeof words);
        for (int j = 0; j < 32; j++) sums[j] += words[j];
    }
    for (int j = 1; j < 32; j++) sums[0] += sums[j];
    atomic_fetch_add(&p->sum, sums[0]);
}

/* Reads memory as fast as it can be read and does nothing with it: what the products above are
 * measured against. Returns the sum of its 64-bit words, of whole lines of 256 bytes. */
EXPORT uint64_t oled_read(const void *memory, int64_t num_bytes, int num_threads) {
    Read read = {.job = {run_read, &GENERIC, 0, 1, 1, 0}, .memory = memory, .num_bytes = num_bytes};
    read.job.num_tasks = tasks_of(num_bytes, READ_TASK_BYTES);
    Call call;
    if (begin_call(&call, num_threads, scratch_bytes(&read.job), 0)) return 0;
    perform(&read.job, call.memory, call.num_threads);
    end_call(&call);
    return read.sum;
}

/* setuptools builds modules of Python, which have this. Nobody imports it: ctypes loads it. */
EXPORT void *PyInit__native(void) { return NULL; }
