// Inputs of products: normed, and rounded to what the product wants.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "threads.h"
#include "vectors.h"

namespace {

// The input of a product: as bf16 for the tile unit, else as integers with a scale for each block of 32. 8 bits of them
// would be five times as coarse as bf16, which turns the choice of a word now and then; few tokens wait for the weights
// anyway, so there are two times 8 bits.
constexpr float kRestSteps = 254.0f;

struct Activations {
  int8_t* q;      // [tokens, cols]
  int8_t* rest;   // [tokens, cols]: what rounding to q has left, in steps of 1 / kRestSteps
  float* scale;   // [tokens, blocks]
  float* total;   // [tokens, blocks]: scale * the sum of q + rest / kRestSteps
  int32_t* sums;  // [tokens, blocks, 2]: the sums of q and of rest
  uint16_t* wide;  // [tokens, cols] bf16
  int64_t blocks;
  bool tiled;  // the tile unit wants everything as [tokens / 16, blocks, 16] instead of [tokens, blocks]

  int64_t at(int64_t token, int64_t block) const {
    return tiled ? (token / kLanes * blocks + block) * kLanes + token % kLanes : token * blocks + block;
  }
};

// Where an operation's results [tokens, width] go: rows of fp32, or, if only a product by tiles reads them, what it would
// round them to.
struct Results {
  float* rows;
  uint16_t* tiles;  // as Activations::wide; null: to rows
  int64_t width;
  bool adds;  // to what the rows hold

  // As much of v as there are columns.
  void put(int64_t token, int64_t column, Floats v) const {
    if (tiles) {
      const int64_t block = token / kLanes * (width / kBlock) + column / kBlock;
      return store(tiles + (block * kLanes + token % kLanes) * kBlock + column % kBlock, to_bf16(v));
    }
    float* to = rows + token * width + column;
    if (width - column >= kLanes) return store(to, adds ? load<Floats>(to) + v : v);
    for (int64_t i = 0; i < width - column; i++) to[i] = adds ? to[i] + v[i] : v[i];
  }
};

struct Scratch {
  Buffer<int8_t> q, rest;
  Buffer<float> scale, total, row, attended, prefixes;
  Buffer<int32_t> sums;
  Buffer<uint16_t> wide, handed;
  Buffer<int64_t> ends, places;

  Activations room(size_t tokens, size_t cols, bool tiled) {
    const size_t blocks = cols / kBlock;
    return {q.at_least(tokens * cols), rest.at_least(tokens * cols), scale.at_least(tokens * blocks), total.at_least(tokens * blocks),
            sums.at_least(2 * tokens * blocks), wide.at_least(tokens * cols), (int64_t)blocks, tiled};
  }
};

// 1 / rms(x)
float norm_factor(const float* x, float eps, int64_t n) {
  constexpr int64_t kChains = 4;
  Floats squares[kChains] = {};
  int64_t i = 0;
  for (; i + kChains * kLanes <= n; i += kChains * kLanes)
    for (int64_t c = 0; c < kChains; c++) squares[c] += load<Floats>(x + i + c * kLanes) * load<Floats>(x + i + c * kLanes);
  for (; i < n; i += kLanes) squares[0] += load<Floats>(x + i) * load<Floats>(x + i);
  return 1.0f / std::sqrt(sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / (float)n + eps);
}

void rms_norm(const float* x, const float* weight, float eps, int64_t n, float* out) {
  const float factor = norm_factor(x, eps, n);
  for (int64_t i = 0; i < n; i += kLanes) store(out + i, load<Floats>(x + i) * factor * load<Floats>(weight + i));
}

// The largest magnitude is found by comparing bit patterns, where a NaN is the largest of all: a broken row stays so.
void quantize(const float* x, int64_t token, const Activations& a) {
  for (int64_t b = 0; b < a.blocks; b++) {
    const int64_t at = a.at(token, b);
    Floats v[2] = {load<Floats>(x + b * kBlock), load<Floats>(x + b * kBlock + kLanes)};
    Ints magnitudes[2] = {(Ints)v[0] & 0x7fffffff, (Ints)v[1] & 0x7fffffff};
    Ints larger = magnitudes[0] > magnitudes[1] ? magnitudes[0] : magnitudes[1];
#if defined(__AVX512F__)
    const int32_t largest = _mm512_reduce_max_epi32((__m512i)larger);
#else
    int32_t largest = 0;
    for (int i = 0; i < kLanes; i++) largest = std::max(largest, larger[i]);
#endif
    float peak;
    std::memcpy(&peak, &largest, sizeof peak);
    const float inverse = peak > 0 ? 127.0f / peak : 0.0f;
    Ints sums{}, rest_sums{};
    for (int half = 0; half < 2; half++) {
      const Floats scaled = v[half] * inverse;
      const Ints q = rounded(scaled), rest = rounded((scaled - __builtin_convertvector(q, Floats)) * kRestSteps);
      sums += q;
      rest_sums += rest;
      store(a.q + at * kBlock + half * kLanes, to_bytes(q));
      store(a.rest + at * kBlock + half * kLanes, to_bytes(rest));
    }
    a.sums[2 * at] = sum(sums);
    a.sums[2 * at + 1] = sum(rest_sums);
    a.scale[at] = peak / 127.0f;
    a.total[at] = peak / 127.0f * ((float)a.sums[2 * at] + (float)a.sums[2 * at + 1] / kRestSteps);
  }
}

// norm: weights of the norm that comes before, or null.
void widen(const float* x, const float* norm, float eps, int64_t token, const Activations& a) {
  const float factor = norm ? norm_factor(x, eps, a.blocks * kBlock) : 1.0f;
  const int64_t apart = a.at(token, 1) - a.at(token, 0);
  uint16_t* to = a.wide + a.at(token, 0) * kBlock;
  for (int64_t b = 0; b < a.blocks; b++, x += kBlock, to += apart * kBlock)
    for (int64_t i = 0; i < kBlock; i += kLanes) {
      const Floats v = load<Floats>(x + i);
      store(to + i, to_bf16(norm ? v * factor * load<Floats>(norm + b * kBlock + i) : v));
    }
}

}  // namespace
