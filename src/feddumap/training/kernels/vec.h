/* Vectors of eight floats, with the vector extensions of GCC and clang.
 *
 * AVX2 and AVX-512 hold one in a register, SSE and NEON in a pair of them. Every variant of the library adds
 * up in the same eight lanes and in the same order, so that results differ between processors only where one
 * of them has no fused multiply-add.
 */
#ifndef FEDDUMAP_VEC_H
#define FEDDUMAP_VEC_H

#include <stdint.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define LANES 8
typedef float vec __attribute__((vector_size(32)));
typedef int32_t ivec __attribute__((vector_size(32)));
typedef uint8_t bvec __attribute__((vector_size(8)));
typedef float vec_at __attribute__((vector_size(32), aligned(4), may_alias)); /* anywhere in memory */
typedef int32_t ivec_at __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint8_t bvec_at __attribute__((vector_size(8), aligned(1), may_alias));

#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

INLINE vec load(const float *p) { return *(const vec_at *)p; }
INLINE void store(float *p, vec v) { *(vec_at *)p = v; }
INLINE vec splat(float x) { return (vec){x, x, x, x, x, x, x, x}; }
INLINE int smaller(int a, int b) { return a < b ? a : b; }
INLINE int whole_lanes(int n) { return (n + LANES - 1) / LANES * LANES; }

INLINE ivec iselect(ivec mask, ivec yes, ivec no) {
#ifdef __AVX2__
    return (ivec)_mm256_blendv_epi8((__m256i)no, (__m256i)yes, (__m256i)mask);
#else
    return (mask & yes) | (~mask & no);
#endif
}

INLINE vec pick(ivec mask, vec yes, vec no) { return (vec)iselect(mask, (ivec)yes, (ivec)no); }

/* As in torch, NaN is propagated. */
INLINE vec relu(vec v) { return pick(v < splat(0), splat(0), v); }

INLINE float sum(vec v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }

/* A bit for each lane whose mask is set. */
INLINE unsigned lane_bits(ivec mask) {
#ifdef __AVX2__
    return (unsigned)_mm256_movemask_ps((__m256)mask);
#else
    unsigned bits = 0;
    for (int i = 0; i < LANES; i++) bits |= (unsigned)(mask[i] & 1) << i;
    return bits;
#endif
}

/* exp(x) for x <= 0, to two units in the last place: Cephes' polynomial, so that results do not depend on libm. */
INLINE vec exp_negative(vec x) {
    ivec vanishes = x < splat(-87); /* the result would not be a normal number */
    x = pick(vanishes, splat(0), x);
    vec n = x * splat(1.44269504f) - splat(0.5f);
    ivec whole = __builtin_convertvector(n, ivec); /* towards zero: x <= 0, so this rounds to nearest */
    n = __builtin_convertvector(whole, vec);
    vec r = x - n * splat(0.693359375f) + n * splat(2.12194440e-4f);
    vec p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * r * r + r + splat(1);
    return pick(vanishes, splat(0), p * (vec)((whole + 127) << 23));
}

INLINE void transpose(vec r[8]) {
#define S __builtin_shufflevector
    vec a0 = S(r[0], r[1], 0, 8, 1, 9, 4, 12, 5, 13), a1 = S(r[0], r[1], 2, 10, 3, 11, 6, 14, 7, 15);
    vec a2 = S(r[2], r[3], 0, 8, 1, 9, 4, 12, 5, 13), a3 = S(r[2], r[3], 2, 10, 3, 11, 6, 14, 7, 15);
    vec a4 = S(r[4], r[5], 0, 8, 1, 9, 4, 12, 5, 13), a5 = S(r[4], r[5], 2, 10, 3, 11, 6, 14, 7, 15);
    vec a6 = S(r[6], r[7], 0, 8, 1, 9, 4, 12, 5, 13), a7 = S(r[6], r[7], 2, 10, 3, 11, 6, 14, 7, 15);
    vec b0 = S(a0, a2, 0, 1, 8, 9, 4, 5, 12, 13), b1 = S(a0, a2, 2, 3, 10, 11, 6, 7, 14, 15);
    vec b2 = S(a1, a3, 0, 1, 8, 9, 4, 5, 12, 13), b3 = S(a1, a3, 2, 3, 10, 11, 6, 7, 14, 15);
    vec b4 = S(a4, a6, 0, 1, 8, 9, 4, 5, 12, 13), b5 = S(a4, a6, 2, 3, 10, 11, 6, 7, 14, 15);
    vec b6 = S(a5, a7, 0, 1, 8, 9, 4, 5, 12, 13), b7 = S(a5, a7, 2, 3, 10, 11, 6, 7, 14, 15);
    r[0] = S(b0, b4, 0, 1, 2, 3, 8, 9, 10, 11), r[1] = S(b1, b5, 0, 1, 2, 3, 8, 9, 10, 11);
    r[2] = S(b2, b6, 0, 1, 2, 3, 8, 9, 10, 11), r[3] = S(b3, b7, 0, 1, 2, 3, 8, 9, 10, 11);
    r[4] = S(b0, b4, 4, 5, 6, 7, 12, 13, 14, 15), r[5] = S(b1, b5, 4, 5, 6, 7, 12, 13, 14, 15);
    r[6] = S(b2, b6, 4, 5, 6, 7, 12, 13, 14, 15), r[7] = S(b3, b7, 4, 5, 6, 7, 12, 13, 14, 15);
#undef S
}

#endif
