// Vectors of 16 lanes, and what needs intrinsics of the processor.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int kLanes = 16;
constexpr int kBlock = 32;  // columns of a quantization block

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef int8_t Bytes __attribute__((vector_size(16)));

template <class V>
inline V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class V>
inline void store(void* p, V v) {
  std::memcpy(p, &v, sizeof v);
}
inline Floats spread(float x) { return Floats{} + x; }
inline Ints spread(int32_t x) { return Ints{} + x; }

inline float sum(Floats v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float total = 0;
  for (int i = 0; i < kLanes; i++) total += v[i];
  return total;
#endif
}

// GCC converts vectors of different sizes in halves: hence intrinsics where these matter.
inline int32_t sum(Ints v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  int32_t total = 0;
  for (int i = 0; i < kLanes; i++) total += v[i];
  return total;
#endif
}

inline Ints rounded(Floats v) { return __builtin_convertvector(v + (v < 0.0f ? spread(-0.5f) : spread(0.5f)), Ints); }

inline Floats from_bf16(Halves h) {
#if defined(__AVX512F__)
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16);
#else
  return (Floats)(__builtin_convertvector(h, Bits) << 16);
#endif
}

inline Bytes to_bytes(Ints v) {
#if defined(__AVX512F__)
  return (Bytes)_mm512_cvtepi32_epi8((__m512i)v);
#else
  return __builtin_convertvector(v, Bytes);
#endif
}

inline Halves to_bf16(Floats v) {  // rounds to nearest even; a NaN stays one
#if defined(__AVX512BF16__)
  return (Halves)_mm512_cvtneps_pbh((__m512)v);
#else
  Bits bits = (Bits)v;
  Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  Bits is_nan = (Bits)((bits & 0x7fffffff) > 0x7f800000);
  return __builtin_convertvector((is_nan & 0x7fc0) | (~is_nan & rounded), Halves);
#endif
}

inline Floats from_fp16(const uint8_t* p) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps((__m256i)load<Halves>(p));
#elif defined(__F16C__)
  Floats v;
  for (int half = 0; half < 2; half++) {
    __m256 part = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p + half));
    std::memcpy((float*)&v + 8 * half, &part, sizeof part);
  }
  return v;
#else
  Floats v;
  for (int i = 0; i < kLanes; i++) {  // shift the exponent into place; subnormals come out right by the product
    uint16_t h;
    std::memcpy(&h, p + 2 * i, 2);
    uint32_t bits = (uint32_t)(h & 0x7fff) << 13;
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    v[i] = (h & 0x8000 ? -1.0f : 1.0f) * magnitude * 0x1p112f;
  }
  return v;
#endif
}

// The larger, or smaller, of both; if one is no number, the second.
inline Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_max_ps((__m512)a, (__m512)b);  // GCC makes two instructions of the other
#else
  return a > b ? a : b;
#endif
}
inline Floats smaller(Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_min_ps((__m512)a, (__m512)b);
#else
  return a < b ? a : b;
#endif
}

// Sixteen vectors, transposed in place.
inline void transpose(Floats* rows) {
#if defined(__AVX512F__)
  __m512i* r = (__m512i*)rows;
  __m512i t[kLanes];
  for (int i = 0; i < kLanes; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < kLanes; i += 4)
    for (int j = 0; j < 2; j++) {
      r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
      r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  for (int i = 0; i < 8; i++) {  // r[i] and r[i + 4]: quarters of rows i & ~3 and four further ones
    const int at = i / 4 * 8 + i % 4;
    t[at] = _mm512_shuffle_i32x4(r[at], r[at + 4], 0x88);
    t[at + 4] = _mm512_shuffle_i32x4(r[at], r[at + 4], 0xdd);
  }
  for (int i = 0; i < 8; i++) {
    const int first = i % 4 + (i / 4) * 4;
    const __m512i a = t[first], b = t[first + 8];
    r[i / 4 * 4 + i % 4] = _mm512_shuffle_i32x4(a, b, 0x88);
    r[i / 4 * 4 + i % 4 + 8] = _mm512_shuffle_i32x4(a, b, 0xdd);
  }
#else
  for (int i = 0; i < kLanes; i++)
    for (int j = 0; j < i; j++) std::swap(((float*)rows)[i * kLanes + j], ((float*)rows)[j * kLanes + i]);
#endif
}

// e^x to a few millionths: 2^n times a polynomial, n found by adding a number so large that fractions fall off. What is
// smaller than 2^-126 comes out as that, what is larger than 2^127 as that; a NaN stays one.
inline Floats exp(Floats x) {
  constexpr float kRounder = 12582912.0f;
  x = larger(spread(-126.0f), smaller(spread(127.0f), x * 1.44269504f));
  const Floats shifted = x + kRounder, f = x - (shifted - kRounder);
  Floats p = spread(1.33335581e-3f);
  for (float c : {9.61812911e-3f, 5.55041087e-2f, 2.40226507e-1f, 6.93147181e-1f, 1.0f}) p = p * f + c;
  return (Floats)((Ints)p + ((Ints)shifted << 23));
}

// 1 / x to 2^-26 or so of normal results: a division of 16 lanes takes as long as all else that an activation does.
inline Floats reciprocal(Floats x) {
#if defined(__AVX512F__)
  const Floats near = (Floats)_mm512_rcp14_ps((__m512)x);
  return near * (2.0f - x * near);
#else
  return 1.0f / x;
#endif
}

// acc + the products of four unsigned bytes in each lane of w with the four signed bytes of a, summed. Where the machine
// has no such instruction for the full range of w, it uses w - 128: see kBias.
#if defined(__AVX512VNNI__)
constexpr bool kBias = true;
inline Ints dot4(Ints acc, Ints w, int32_t a) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(a));
}
inline Ints dot4_wide(Ints acc, Ints w, int32_t a) { return dot4(acc, w, a); }
#elif defined(__AVX2__)
constexpr bool kBias = false;
template <class Product>
inline Ints by_halves(Ints acc, Ints w, int32_t a, Product product) {
  __m256i halves[2];
  std::memcpy(halves, &w, sizeof halves);
  for (auto& half : halves) half = _mm256_madd_epi16(product(half, _mm256_set1_epi32(a)), _mm256_set1_epi16(1));
  return acc + load<Ints>(halves);
}
inline Ints dot4(Ints acc, Ints w, int32_t a) {  // w <= 15: pairs fit 16 bits
  return by_halves(acc, w, a, [](__m256i x, __m256i y) { return _mm256_maddubs_epi16(x, y); });
}
inline Ints dot4_wide(Ints acc, Ints w, int32_t a) {  // |w - 128| * |a| <= 128 * 127: pairs fit 16 bits
  return by_halves(acc, w, a, [](__m256i x, __m256i y) {
    __m256i centred = _mm256_xor_si256(x, _mm256_set1_epi8(-128));
    return _mm256_maddubs_epi16(_mm256_abs_epi8(centred), _mm256_sign_epi8(y, centred));
  });
}
#else
constexpr bool kBias = true;
inline Ints dot4(Ints acc, Ints w, int32_t a) {
  for (int byte = 0; byte < 4; byte++) acc += ((w >> (8 * byte)) & 0xff) * spread((int32_t)(int8_t)(a >> (8 * byte)));
  return acc;
}
inline Ints dot4_wide(Ints acc, Ints w, int32_t a) { return dot4(acc, w, a); }
#endif

// acc + the products of the two bf16 values in each lane, summed.
inline Floats dot2(Floats acc, Ints w, Ints a) {
#if defined(__AVX512BF16__)
  return (Floats)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)a);
#else
  const Bits high = (Bits)spread((int32_t)0xffff0000);
  acc += (Floats)((Bits)w << 16) * (Floats)((Bits)a << 16);
  return acc + (Floats)((Bits)w & high) * (Floats)((Bits)a & high);
#endif
}

}  // namespace
