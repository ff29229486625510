// Attention of a chunk's queries with the tile unit, over a cache in bf16.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "attention.h"
#include "tiles.h"

#if defined(HAS_TILES)

namespace {

// As QueryBlock, with both products in tiles of bf16: scores [keys][rows] = K Q^T, and out [dims][rows] += V^T weights.
// So rows lie side by side in a vector all the way. Keys are as they are in the cache; values must be transposed.
class TileQueryBlock : public ChunkRows<TileQueryBlock> {
  friend ChunkRows<TileQueryBlock>;

 public:
  static constexpr int64_t kKeys = 64;
  static constexpr float kExcess = kUncut;  // of totals over what weights are in the mean, being cut off
  static constexpr float kUnit = 1 / kLog2E;  // of scores

  static bool fits(const Op& op) {
    return op.cache_bf16 && op.head_dim % kBlock == 0 && op.q_heads / op.kv_heads <= kRows;
  }
  // Floats of memory that it works in.
  static size_t room(const Op& op) { return op.head_dim * (kRows * 3 / 2 + kKeys) + kKeys * kLanes * 3 / 2; }

  TileQueryBlock(const Op& op, const Step& step, const Queries& queries, int64_t kv_head, float* room)
      : ChunkRows(op, step, queries, kv_head, room), scores_(room + kRows * dim_),
        weights_((uint8_t*)(scores_ + kKeys * kLanes)), scaled_(weights_ + kKeys * kLanes * 2),
        keys_(scaled_ + kRows * dim_ * 2), values_(keys_ + kKeys * dim_ * 2) {}

 private:
  // Queries as bf16 pairs of dimensions [dim / 2][16 rows], scaled so that scores, unless capped, are powers of 2.
  void start(int64_t v) {
    const float scale = op_.score_scale * (op_.softcap == 0 ? kLog2E : 1.0f);
    const float* queries[kLanes];
    for (int64_t lane = 0; lane < kLanes; lane++) queries[lane] = op_.in + place(row_of(v, lane));
    for (int64_t d = 0; d < dim_; d += kBlock) {
      __m512i pairs[kLanes];
      for (int64_t lane = 0; lane < kLanes; lane++) {
        const Floats low = load<Floats>(queries[lane] + d) * scale, high = load<Floats>(queries[lane] + d + kLanes) * scale;
        pairs[lane] = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
      }
      transpose((Floats*)pairs);
      for (int64_t i = 0; i < kLanes; i++) store(scaled_ + 32 * (v * dim_ + d) + 64 * i, pairs[i]);
    }
  }

  // keys_ [dim / 32][kKeys][32]; values_ [kKeys / 32][dim][32 keys]. Keys after the last one repeat it, and are masked.
  void fetch(int64_t first, Places& places) {
    int64_t at[kKeys];
    for (int64_t k = 0; k < kKeys; k++) at[k] = first + k <= last_ ? places.next() : at[k - 1];
    const uint16_t* keys = (const uint16_t*)op_.k_cache;
    for (int64_t d = 0; d < dim_; d += kBlock)
      for (int64_t k = 0; k < kKeys; k++)
        store(keys_ + 2 * (d * kKeys + k * kBlock), load<Ints>(keys + at[k] + d));
    const uint16_t* values = (const uint16_t*)op_.v_cache;
    for (int64_t k = 0; k < kKeys; k += kBlock) {
      for (int64_t d = 0; d < dim_; d += kLanes) {
        __m512i pairs[kLanes];
        for (int64_t i = 0; i < kLanes; i++) {
          const __m512i even = _mm512_cvtepu16_epi32((__m256i)load<Halves>(values + at[k + 2 * i] + d));
          const __m512i odd = _mm512_cvtepu16_epi32((__m256i)load<Halves>(values + at[k + 2 * i + 1] + d));
          pairs[i] = _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
        }
        transpose((Floats*)pairs);
        for (int64_t i = 0; i < kLanes; i++) store(values_ + 2 * (k * dim_ + (d + i) * kBlock), pairs[i]);
      }
    }
  }

  void add_keys(int64_t vectors, int64_t first) {
    for (int64_t v = 0; v < vectors; v++) {
      const int64_t seen = seen_from(v, first);
      if (seen > kBlock)
        add<2>(v, first);
      else if (seen > 0)
        add<1>(v, first);
    }
  }

  // So many times 32 of the keys.
  template <int kBlocks>
  void add(int64_t v, int64_t first) {
    multiply_keys<kBlocks>(v);
    weigh<kBlocks * kBlock>(v, first);
    add_values<kBlocks>(out_ + v * dim_ * kLanes);
  }

  // Scores become weights, and what was summed before shrinks if a row's maximum has grown.
  template <int kCount>
  void weigh(int64_t v, int64_t first) {
    Floats* scores = (Floats*)scores_;
    if (op_.softcap != 0)
      for (int64_t k = 0; k < kCount; k++) scores[k] = capped(scores[k], op_.softcap) * kLog2E;
    mask_unseen(v, first, kCount, scores);
    constexpr int64_t kChains = 4;
    Floats tops[kChains] = {tops_[v], tops_[v], tops_[v], tops_[v]}, totals[2] = {};
    for (int64_t k = 0; k < kCount; k += kChains)
      for (int64_t i = 0; i < kChains; i++) tops[i] = larger(scores[k + i], tops[i]);
    const Floats top = larger(larger(tops[0], tops[1]), larger(tops[2], tops[3]));
    for (int64_t k = 0; k < kCount; k += 2) {
      const Floats even = rough_exp2(scores[k] - top, kUncut), odd = rough_exp2(scores[k + 1] - top, kUncut);
      totals[0] += even;
      totals[1] += odd;
      store(weights_ + 32 * k, cut_pairs(even, odd));
    }
    if (_mm512_cmp_ps_mask((__m512)top, (__m512)tops_[v], _CMP_GT_OQ) != 0) {
      const Floats shrink = rough_exp2(tops_[v] - top);
      totals_[v] *= shrink;
      float* out = out_ + v * dim_ * kLanes;
      for (int64_t d = 0; d < dim_; d++) store(out + d * kLanes, load<Floats>(out + d * kLanes) * shrink);
    }
    tops_[v] = top;
    totals_[v] += totals[0] + totals[1];
  }

  template <int kBlocks>
  void multiply_keys(int64_t v) const {
    static_assert(kKeys == 4 * kLanes, "a tile of sums for each 16 keys");
    _tile_zero(0);
    _tile_zero(1);
    if (kBlocks > 1) _tile_zero(2);
    if (kBlocks > 1) _tile_zero(3);
    for (int64_t d = 0; d < dim_; d += kBlock) {
      const uint8_t* keys = keys_ + 2 * d * kKeys;
      _tile_loadd(4, scaled_ + 32 * (v * dim_ + d), 64);
      _tile_loadd(5, keys, 64);
      _tile_dpbf16ps(0, 5, 4);
      _tile_loadd(6, keys + 1024, 64);
      _tile_dpbf16ps(1, 6, 4);
      if (kBlocks == 1) continue;
      _tile_loadd(7, keys + 2048, 64);
      _tile_dpbf16ps(2, 7, 4);
      _tile_loadd(5, keys + 3072, 64);
      _tile_dpbf16ps(3, 5, 4);
    }
    _tile_stored(0, scores_, 64);
    _tile_stored(1, scores_ + 256, 64);
    if (kBlocks == 1) return;
    _tile_stored(2, scores_ + 512, 64);
    _tile_stored(3, scores_ + 768, 64);
  }

  template <int kBlocks>
  void add_values(float* out) const {
    static_assert(kKeys == 2 * kBlock, "two tiles of weights");
    _tile_loadd(4, weights_, 64);
    if (kBlocks > 1) _tile_loadd(5, weights_ + 1024, 64);
    for (int64_t d = 0; d < dim_; d += 2 * kLanes) {
      const uint8_t* values = values_ + 2 * d * kBlock;
      _tile_loadd(0, out + d * kLanes, 64);
      _tile_loadd(1, out + (d + kLanes) * kLanes, 64);
      _tile_loadd(6, values, 64);
      _tile_dpbf16ps(0, 6, 4);
      _tile_loadd(7, values + 1024, 64);
      _tile_dpbf16ps(1, 7, 4);
      if (kBlocks > 1) {
        _tile_loadd(6, values + 2 * kBlock * dim_, 64);
        _tile_dpbf16ps(0, 6, 5);
        _tile_loadd(7, values + 2 * kBlock * dim_ + 1024, 64);
        _tile_dpbf16ps(1, 7, 5);
      }
      _tile_stored(0, out + d * kLanes, 64);
      _tile_stored(1, out + (d + kLanes) * kLanes, 64);
    }
  }

  float* scores_;                                  // [kKeys][16]
  uint8_t *weights_, *scaled_, *keys_, *values_;   // bf16 pairs, scaled_ being queries
};

}  // namespace

#endif
