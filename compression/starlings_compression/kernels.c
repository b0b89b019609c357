/* The inner loops of int8:B, one pass over memory each. Compiled by compiled.py where there is a compiler; used only if
 * they give the bits of the eager path, so every operation is rounded alone and in the same order (no contraction, no
 * fast math). Blocks are whole: rests are the eager path's. Callers have checked all lengths.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define SMALLEST_NORMAL 1.17549435e-38f
#define LARGEST 3.40282347e+38f
/* Of magnitudes: infinity's, above all finite ones, and below every NaN's. */
#define INFINITY_BITS 0x7f800000u
/* Added and taken away again it leaves a number below 2^22 rounded to the nearest even whole one. */
#define ROUNDING 12582912.0f

typedef uint32_t eight_words __attribute__((vector_size(32)));
typedef uint64_t pairs_of_words __attribute__((vector_size(32)));
typedef float four_floats __attribute__((vector_size(16)));
typedef double four_doubles __attribute__((vector_size(32)));

static inline float as_float(uint32_t bits) { float value; memcpy(&value, &bits, 4); return value; }
static inline uint32_t as_bits(float value) { uint32_t bits; memcpy(&bits, &value, 4); return bits; }
static inline float bounded(float value) {
    value = value > LARGEST ? LARGEST : value;
    return value < -LARGEST ? -LARGEST : value;
}

/* As a whole number, so that NaN counts: bits of magnitudes are in the order of the magnitudes, and those of infinities and
 * NaN are above all others.
 */
static inline uint32_t larger(uint32_t peak, float value) {
    uint32_t magnitude = as_bits(value) & 0x7fffffffu;
    return magnitude > peak ? magnitude : peak;
}

/* The scale of a block with that peak, which also goes to `out` as bfloat16. */
static inline float scale_of(uint32_t peak, uint16_t *out) {
    float wide = as_float(peak) / 127.0f;
    wide = wide < SMALLEST_NORMAL ? SMALLEST_NORMAL : wide;
    uint32_t rounded = as_bits(wide);
    rounded = (rounded + (0x7fffu + ((rounded >> 16) & 1u))) & 0xffff0000u;
    *out = (uint16_t)(rounded >> 16);
    return as_float(rounded);
}

static inline float code_of(float value, float inverse) { return (value * inverse + ROUNDING) - ROUNDING; }

/* int8 of values. Returns the bits of the largest peak. */
uint32_t encode_int8(const float *restrict values, uint16_t *restrict scales, int8_t *restrict codes, size_t blocks,
                     size_t block) {
    uint32_t worst = 0;
    for (size_t b = 0; b < blocks; b++) {
        const float *source = values + b * block;
        int8_t *numbers = codes + b * block;
        uint32_t peak = 0;
        for (size_t i = 0; i < block; i++) peak = larger(peak, source[i]);
        worst = peak > worst ? peak : worst;
        float inverse = 1.0f / scale_of(peak, scales + b);
        for (size_t i = 0; i < block; i++) numbers[i] = (int8_t)(int32_t)code_of(source[i], inverse);
    }
    return worst;
}

/* One summand of a sum: codes with a scale per block, or plain floats where `scales` is NULL. */
struct term {
    const void *values;
    const uint16_t *scales;
    float weight;
};

/* Writes block `b` of a term to `out`, or adds it. A weight of 1 changes no bit. */
static inline void take_block(const struct term *term, size_t b, float *restrict out, size_t block, int add) {
    float weight = term->weight;
    if (term->scales == NULL) {
        const float *values = (const float *)term->values + b * block;
        if (add) for (size_t i = 0; i < block; i++) out[i] += values[i] * weight;
        else for (size_t i = 0; i < block; i++) out[i] = values[i] * weight;
        return;
    }
    const int8_t *codes = (const int8_t *)term->values + b * block;
    float scale = as_float((uint32_t)term->scales[b] << 16);
    if (scale > LARGEST / 128.0f) {
        for (size_t i = 0; i < block; i++) {
            float value = bounded((float)codes[i] * scale) * weight;
            out[i] = add ? out[i] + value : value;
        }
    } else if (add) {
        for (size_t i = 0; i < block; i++) out[i] += (float)codes[i] * scale * weight;
    } else {
        for (size_t i = 0; i < block; i++) out[i] = (float)codes[i] * scale * weight;
    }
}

/* int8 of block `b` of a weighted sum, added up in the order of its terms, plus a residual (none where it is NULL); `error`
 * receives what that drops, and `scale` what codes are multiplied by. Returns the bits of the peak. `plain`: the sum is the
 * first term itself.
 */
static inline uint32_t encode_block_of_sum(const struct term *terms, size_t count, int plain, const float *residual,
                                           uint16_t *scales, int8_t *codes, float *error, size_t b, size_t block,
                                           float *scale_used) {
    float *restrict dropped = error + b * block;
    int8_t *restrict numbers = codes + b * block;
    const float *sum = plain ? (const float *)terms[0].values + b * block : dropped;
    if (!plain) for (size_t t = 0; t < count; t++) take_block(terms + t, b, dropped, block, t > 0);
    uint32_t peak = 0;
    if (residual == NULL) {
        for (size_t i = 0; i < block; i++) peak = larger(peak, sum[i]);
    } else {
        const float *restrict added = residual + b * block;
        for (size_t i = 0; i < block; i++) {
            float corrected = sum[i] + added[i];
            peak = larger(peak, corrected);
            dropped[i] = corrected;
        }
        sum = dropped;
    }
    float scale = scale_of(peak, scales + b), inverse = 1.0f / scale;
    if (scale > LARGEST / 128.0f) {
        for (size_t i = 0; i < block; i++) {
            float code = code_of(sum[i], inverse);
            numbers[i] = (int8_t)(int32_t)code;
            dropped[i] = sum[i] - bounded(code * scale);
        }
    } else {
        for (size_t i = 0; i < block; i++) {
            float code = code_of(sum[i], inverse);
            numbers[i] = (int8_t)(int32_t)code;
            dropped[i] = sum[i] - code * scale;
        }
    }
    *scale_used = scale;
    return peak;
}

static inline int plain_sum(const struct term *terms, size_t count) {
    return count == 1 && terms[0].scales == NULL && terms[0].weight == 1.0f;
}

/* int8 of the weighted sum of at least one term. Returns the bits of the largest peak. */
uint32_t encode_int8_of_sum(const struct term *terms, size_t count, const float *residual, uint16_t *scales,
                            int8_t *codes, float *error, size_t blocks, size_t block) {
    uint32_t worst = 0;
    float scale;
    int plain = plain_sum(terms, count);
    for (size_t b = 0; b < blocks; b++) {
        uint32_t peak = encode_block_of_sum(terms, count, plain, residual, scales, codes, error, b, block, &scale);
        worst = peak > worst ? peak : worst;
    }
    return worst;
}

/* out = code * scale */
void decode_int8(const uint16_t *restrict scales, const int8_t *restrict codes, float *restrict out, size_t blocks,
                 size_t block) {
    for (size_t b = 0; b < blocks; b++) {
        float scale = as_float((uint32_t)scales[b] << 16);
        const int8_t *numbers = codes + b * block;
        float *target = out + b * block;
        for (size_t i = 0; i < block; i++) target[i] = bounded((float)numbers[i] * scale);
    }
}

/* As vectors of 32 bytes by hand: left to itself a compiler keeps such sums apart only under fast math. */
struct folded {
    pairs_of_words sums[2];
    four_doubles norms[4];
};

static inline void fold(struct folded *state, const void *restrict words, const uint32_t *restrict weights, size_t count) {
    for (size_t i = 0; i < count; i += 16) {
        const char *at = (const char *)words + 4 * i;
        for (int j = 0; j < 2; j++) {
            eight_words some, factors;
            memcpy(&some, at + 32 * j, sizeof some);
            memcpy(&factors, weights + i + 8 * j, sizeof factors);
            state->sums[j] += (pairs_of_words)(some * factors);
        }
        for (int j = 0; j < 4; j++) {
            four_floats values;
            memcpy(&values, at + 16 * j, sizeof values);
            four_doubles wide = __builtin_convertvector(values, four_doubles);
            state->norms[j] += wide * wide;
        }
    }
}

static inline uint64_t finish(const struct folded *state, double *squares) {
    pairs_of_words sum = state->sums[0] + state->sums[1];
    four_doubles norm = (state->norms[0] + state->norms[1]) + (state->norms[2] + state->norms[3]);
    *squares = (norm[0] + norm[1]) + (norm[2] + norm[3]);
    return sum[0] + sum[1] + sum[2] + sum[3];
}

/* Adds up words that are multiplied by a weight each, modulo 2^32, as pairs modulo 2^64; returns the sum. `squares` receives
 * the sum of squares of the words as floats. `count` is a multiple of 16.
 */
uint64_t fold_words(const uint32_t *restrict words, const uint32_t *restrict weights, size_t count, double *squares) {
    struct folded state = {0};
    fold(&state, words, weights, count);
    return finish(&state, squares);
}

/* decode_int8 of `chunks` pieces of `count` elements, and fold_words of each of them: as long as a block of it is in the
 * innermost cache. `block` is a multiple of 16 and divides `count`.
 */
void decode_int8_folded(const uint16_t *restrict scales, const int8_t *restrict codes, float *restrict out,
                        const uint32_t *restrict weights, size_t chunks, size_t count, size_t block,
                        uint64_t *restrict sums, double *restrict squares) {
    for (size_t c = 0; c < chunks; c++) {
        struct folded state = {0};
        for (size_t start = 0; start < count; start += block) {
            size_t first = c * count + start;
            float scale = as_float((uint32_t)scales[first / block] << 16);
            for (size_t i = 0; i < block; i++) out[first + i] = bounded((float)codes[first + i] * scale);
            fold(&state, out + first, weights + start, block);
        }
        sums[c] = finish(&state, squares + c);
    }
}

/* encode_int8_of_sum of `chunks` pieces of `length` elements, of which each block is then replaced in `out` by what it
 * decodes to, and fold_words of each piece of that. `out` may be the values of a term. Returns how many blocks were done: it
 * stops at one that is not finite, before anything of it is replaced.
 */
size_t encode_int8_of_sum_folded(const struct term *terms, size_t count, const float *residual, uint16_t *scales,
                                 int8_t *codes, float *error, float *out, const uint32_t *weights, size_t chunks,
                                 size_t length, size_t block, uint64_t *sums, double *squares) {
    int plain = plain_sum(terms, count);
    float scale;
    for (size_t c = 0; c < chunks; c++) {
        struct folded state = {0};
        for (size_t start = 0; start < length; start += block) {
            size_t first = c * length + start, b = first / block;
            uint32_t peak = encode_block_of_sum(terms, count, plain, residual, scales, codes, error, b, block, &scale);
            if (peak >= INFINITY_BITS) return b;
            const int8_t *restrict numbers = codes + first;
            float *restrict target = out + first;
            for (size_t i = 0; i < block; i++) target[i] = bounded((float)numbers[i] * scale);
            fold(&state, target, weights + start, block);
        }
        sums[c] = finish(&state, squares + c);
    }
    return chunks * length / block;
}

#define PIECE 512

/* The weighted sum of at least one term of plain floats, added up in their order, of `chunks` pieces of `length` elements
 * (a multiple of PIECE) into `out`, which may be the values of a term; and fold_words of each of them. Returns how many
 * elements were done: it stops at a PIECE that is not finite, before anything of it is written.
 */
size_t add_up_folded(const struct term *terms, size_t count, float *out, const uint32_t *weights, size_t chunks,
                     size_t length, uint64_t *sums, double *squares) {
    float piece[PIECE];
    for (size_t c = 0; c < chunks; c++) {
        struct folded state = {0};
        for (size_t start = 0; start < length; start += PIECE) {
            size_t first = c * length + start;
            for (size_t t = 0; t < count; t++) take_block(terms + t, first / PIECE, piece, PIECE, t > 0);
            uint32_t peak = 0;
            for (size_t i = 0; i < PIECE; i++) peak = larger(peak, piece[i]);
            if (peak >= INFINITY_BITS) return first;
            memcpy(out + first, piece, sizeof piece);
            fold(&state, piece, weights + start, PIECE);
        }
        sums[c] = finish(&state, squares + c);
    }
    return chunks * length;
}
