/* The inner loops of int8:B, one pass over memory each. Compiled by compiled.py where there is a compiler; used only if
 * they give the bits of the eager path, so every operation is rounded alone and in the same order (no contraction, no
 * fast math). Blocks are whole: rests are the eager path's. Callers have checked all lengths.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define SMALLEST_NORMAL 1.17549435e-38f
#define LARGEST 3.40282347e+38f
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

/* Scale and codes of one block; returns the bits of its peak. As whole numbers, bits of magnitudes are in the order of the
 * magnitudes, and those of infinities and NaN are above all others.
 */
static inline uint32_t encode_block(const float *restrict values, uint16_t *scale_out, int8_t *restrict codes,
                                    float *scale_used, size_t block) {
    uint32_t peak = 0;
    for (size_t i = 0; i < block; i++) {
        uint32_t magnitude = as_bits(values[i]) & 0x7fffffffu;
        peak = magnitude > peak ? magnitude : peak;
    }
    float wide = as_float(peak) / 127.0f;
    wide = wide < SMALLEST_NORMAL ? SMALLEST_NORMAL : wide;
    uint32_t rounded = as_bits(wide);
    rounded = (rounded + (0x7fffu + ((rounded >> 16) & 1u))) & 0xffff0000u;
    *scale_out = (uint16_t)(rounded >> 16);
    *scale_used = as_float(rounded);
    float inverse = 1.0f / as_float(rounded);
    for (size_t i = 0; i < block; i++) {
        float code = values[i] * inverse;
        code = (code + ROUNDING) - ROUNDING;
        codes[i] = (int8_t)(int32_t)code;
    }
    return peak;
}

/* int8 of values. Returns the bits of the largest peak. */
uint32_t encode_int8(const float *restrict values, uint16_t *restrict scales, int8_t *restrict codes, size_t blocks,
                     size_t block) {
    uint32_t worst = 0;
    float scale;
    for (size_t b = 0; b < blocks; b++) {
        uint32_t peak = encode_block(values + b * block, scales + b, codes + b * block, &scale, block);
        worst = peak > worst ? peak : worst;
    }
    return worst;
}

/* int8 of values + residual (none where it is NULL); `error` receives what that drops. */
uint32_t encode_int8_with_error(const float *restrict values, const float *restrict residual, uint16_t *restrict scales,
                                int8_t *restrict codes, float *restrict error, size_t blocks, size_t block) {
    uint32_t worst = 0;
    float scale;
    for (size_t b = 0; b < blocks; b++) {
        const float *source = values + b * block;
        float *dropped = error + b * block;
        int8_t *numbers = codes + b * block;
        if (residual == NULL) {
            memcpy(dropped, source, block * sizeof(float));
        } else {
            const float *added = residual + b * block;
            for (size_t i = 0; i < block; i++) dropped[i] = source[i] + added[i];
        }
        uint32_t peak = encode_block(dropped, scales + b, numbers, &scale, block);
        worst = peak > worst ? peak : worst;
        for (size_t i = 0; i < block; i++) dropped[i] -= bounded((float)numbers[i] * scale);
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

/* Adds up words that are multiplied by a weight each, modulo 2^32, as pairs modulo 2^64; returns the sum. `squares` receives
 * the sum of squares of the words as floats. `count` is a multiple of 16.
 */
uint64_t fold_words(const uint32_t *restrict words, const uint32_t *restrict weights, size_t count, double *squares) {
    /* As vectors of 32 bytes by hand: left to itself a compiler keeps such sums apart only under fast math. */
    pairs_of_words sums[2] = {{0}, {0}};
    four_doubles norms[4] = {{0}, {0}, {0}, {0}};
    for (size_t i = 0; i < count; i += 16) {
        for (int j = 0; j < 2; j++) {
            eight_words some, factors;
            memcpy(&some, words + i + 8 * j, sizeof some);
            memcpy(&factors, weights + i + 8 * j, sizeof factors);
            sums[j] += (pairs_of_words)(some * factors);
        }
        for (int j = 0; j < 4; j++) {
            four_floats values;
            memcpy(&values, words + i + 4 * j, sizeof values);
            four_doubles wide = __builtin_convertvector(values, four_doubles);
            norms[j] += wide * wide;
        }
    }
    pairs_of_words sum = sums[0] + sums[1];
    four_doubles norm = (norms[0] + norms[1]) + (norms[2] + norms[3]);
    *squares = (norm[0] + norm[1]) + (norm[2] + norm[3]);
    return sum[0] + sum[1] + sum[2] + sum[3];
}
