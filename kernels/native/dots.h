// Products for few tokens: dot products with a panel of weights, in vectors.

#pragma once

#include <cstdint>

#include "activations.h"
#include "interface.h"

namespace {

constexpr int64_t kBlockBytes[] = {320, 544, 1024};
constexpr int kMaxTogether = 8;  // tokens that share the unpacked weights: their sums stay in registers

constexpr int64_t kBlocksAhead = 16;

inline void prefetch_block(const uint8_t* w, int64_t bytes, int64_t ahead = kBlocksAhead) {
  for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(w + ahead * bytes + line);
}

inline Floats joined(Ints dot, Ints rest) {
  return __builtin_convertvector(dot, Floats) + __builtin_convertvector(rest, Floats) * (1.0f / kRestSteps);
}

template <int kTokens>
void dot_q4(const uint8_t* w, int64_t blocks, const Activations& a, int64_t first, Floats* out) {
  Floats acc[kTokens] = {};
  for (int64_t b = 0; b < blocks; b++, w += kBlockBytes[kQ4]) {
    prefetch_block(w, kBlockBytes[kQ4]);
    Ints q[8];
    for (int j = 0; j < 4; j++) {
      const Ints pairs = load<Ints>(w + 64 * j);
      q[j] = pairs & 0x0f0f0f0f;
      q[j + 4] = (pairs >> 4) & 0x0f0f0f0f;
    }
    const Floats d = from_fp16(w + 256), m = from_fp16(w + 288);
    for (int t = 0; t < kTokens; t++) {
      const int64_t at = (first + t) * blocks + b;
      Ints dot{}, rest{};
      for (int j = 0; j < 8; j++) {
        dot = dot4(dot, q[j], load<int32_t>(a.q + at * kBlock + 4 * j));
        rest = dot4(rest, q[j], load<int32_t>(a.rest + at * kBlock + 4 * j));
      }
      acc[t] += joined(dot, rest) * (d * a.scale[at]) + m * a.total[at];
    }
  }
  for (int t = 0; t < kTokens; t++) out[t] = acc[t];
}

template <int kTokens>
void dot_q8(const uint8_t* w, int64_t blocks, const Activations& a, int64_t first, Floats* out) {
  Floats acc[kTokens] = {};
  for (int64_t b = 0; b < blocks; b++, w += kBlockBytes[kQ8]) {
    prefetch_block(w, kBlockBytes[kQ8]);
    Ints q[8];
    for (int j = 0; j < 8; j++) q[j] = load<Ints>(w + 64 * j);
    const Floats d = from_fp16(w + 512);
    for (int t = 0; t < kTokens; t++) {
      const int64_t at = (first + t) * blocks + b;
      Ints dot = spread(kBias ? -128 * a.sums[2 * at] : 0), rest = spread(kBias ? -128 * a.sums[2 * at + 1] : 0);
      for (int j = 0; j < 8; j++) {
        dot = dot4_wide(dot, q[j], load<int32_t>(a.q + at * kBlock + 4 * j));
        rest = dot4_wide(rest, q[j], load<int32_t>(a.rest + at * kBlock + 4 * j));
      }
      acc[t] += joined(dot, rest) * (d * a.scale[at]);
    }
  }
  for (int t = 0; t < kTokens; t++) out[t] = acc[t];
}

template <int kTokens>
void dot_bf16(const uint8_t* w, int64_t blocks, const Activations& a, int64_t first, Floats* out) {
  Floats acc[kTokens] = {};
  for (int64_t b = 0; b < blocks; b++, w += kBlockBytes[kBf16]) {
    prefetch_block(w, kBlockBytes[kBf16]);
    for (int j = 0; j < 16; j++) {
      const Ints pairs = load<Ints>(w + 64 * j);
      for (int t = 0; t < kTokens; t++) {
        const uint16_t* x = a.wide + ((first + t) * blocks + b) * kBlock;
        acc[t] = dot2(acc[t], pairs, spread(load<int32_t>(x + 2 * j)));
      }
    }
  }
  for (int t = 0; t < kTokens; t++) out[t] = acc[t];
}

template <int kTokens>
void dot_panel(int32_t kind, const uint8_t* w, int64_t blocks, const Activations& a, int64_t first, Floats* out) {
  if (kind == kQ4) return dot_q4<kTokens>(w, blocks, a, first, out);
  if (kind == kQ8) return dot_q8<kTokens>(w, blocks, a, first, out);
  dot_bf16<kTokens>(w, blocks, a, first, out);
}

// out[t]: the products of a panel with tokens first .. first + count - 1, at most kMaxTogether.
void dot_tokens(int32_t kind, const uint8_t* w, int64_t blocks, const Activations& a, int64_t first, int count, Floats* out) {
  if (count == 8) return dot_panel<8>(kind, w, blocks, a, first, out);
  if (count >= 4) {
    dot_panel<4>(kind, w, blocks, a, first, out);
    first += 4, out += 4, count -= 4;
  }
  if (count >= 2) {
    dot_panel<2>(kind, w, blocks, a, first, out);
    first += 2, out += 2, count -= 2;
  }
  if (count) dot_panel<1>(kind, w, blocks, a, first, out);
}

}  // namespace
