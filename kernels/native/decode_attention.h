// Attention of single queries: the decodes of a step.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "attention.h"

namespace {

// Sixteen vectors to the vector of their sums, by adding halves crosswise.
inline Floats sums_of(Floats* v) {
#if defined(__AVX512F__)
  __m512 r[8];
  for (int i = 0; i < 8; i++) {  // 128-bit parts of v[i] and v[i + 8]
    const __m512 a = (__m512)v[i], b = (__m512)v[i + 8];
    r[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  }
  for (int i = 0; i < 4; i++)
    r[i] = _mm512_add_ps(_mm512_shuffle_f32x4(r[i], r[i + 4], 0x88), _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd));
  for (int i = 0; i < 2; i++)
    r[i] = _mm512_add_ps(_mm512_unpacklo_ps(r[i], r[i + 2]), _mm512_unpackhi_ps(r[i], r[i + 2]));
  const __m512 last = _mm512_add_ps(_mm512_unpacklo_ps(r[0], r[1]), _mm512_unpackhi_ps(r[0], r[1]));
  // Lane 4 k + i now holds vector {0, 8, 4, 12}[k] + {0, 1, 2, 3}[i].
  return (Floats)_mm512_shuffle_f32x4(last, last, 0xd8);
#else
  Floats out;
  for (int i = 0; i < kLanes; i++) out[i] = sum(v[i]);
  return out;
#endif
}

// 32 values of the cache as two vectors in the order that is the cheapest to make, and other values from and to that order.
inline void get_pair(const float* p, Floats& one, Floats& two) { one = load<Floats>(p), two = load<Floats>(p + kLanes); }
inline void get_pair(const uint16_t* p, Floats& even, Floats& odd) {
  const Ints both = load<Ints>(p);
  even = (Floats)(both << 16), odd = (Floats)(both & (int32_t)0xffff0000);
}
inline void to_pair(const float*, Floats&, Floats&) {}
inline void to_pair(const uint16_t*, Floats& a, Floats& b) {
  const Floats low = a, high = b;
  a = __builtin_shufflevector(low, high, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  b = __builtin_shufflevector(low, high, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}
inline void from_pair(const float*, Floats&, Floats&) {}
inline void from_pair(const uint16_t*, Floats& a, Floats& b) {
  const Floats even = a, odd = b;
  a = __builtin_shufflevector(even, odd, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  b = __builtin_shufflevector(even, odd, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

// The query of a sequence that decodes, of so many key-value heads from this one, and the tokens first_seen .. kv_len - 1.
struct Decode {
  int64_t sequence, head, heads, first_seen, kv_len;
};

// The heads that share each of a decode's key-value heads, its rows. They see 16 tokens at a time, and of those all heads,
// since these lie together. What tokens before have given may be added.
template <class Cache>
class Query {
 public:
  // Floats of memory that it works in.
  static size_t room(const Op& op, const Decode& decode) {
    return decode.heads * (op.q_heads / op.kv_heads) * (decode.kv_len + kLanes + 2 * op.head_dim);
  }

  // next: whose keys come to the second cache meanwhile. places: room for the tokens seen, rounded up to 16. before: of the
  // first_seen tokens, PrefixSums of the rows, or null.
  Query(const Op& op, const Step& step, const Decode& decode, const Decode& next, const float* before, float* room,
        int64_t* places)
      : op_(op), seen_(decode.kv_len - decode.first_seen), before_(before), padded_((seen_ + kLanes - 1) / kLanes * kLanes),
        group_(op.q_heads / op.kv_heads), rows_(decode.heads * group_), dim_(op.head_dim), queries_(room),
        sums_(queries_ + rows_ * dim_), scores_(sums_ + rows_ * dim_),
        next_(op, step, next.sequence, next.head, next.first_seen), next_tokens_(next.kv_len - next.first_seen),
        places_(places) {
    Places walk(op, step, decode.sequence, decode.head, decode.first_seen);
    for (int64_t t = 0; t < padded_; t++) places[t] = t < seen_ ? walk.next() : places[t - 1];
  }

  // q, out [heads][group][dim]
  void attend(const float* q, float* out) {
    for (int64_t i = 0; i < rows_ * dim_; i += kLanes) store(queries_ + i, load<Floats>(q + i) * op_.score_scale);
    each_pair(queries_, [](Floats& a, Floats& b) { to_pair((const Value*)nullptr, a, b); });
    for (int64_t first = 0; first < padded_; first += kLanes) {
      const bool is_last = first + kLanes == padded_;
      const Block block{op_.k_cache, first, is_last ? op_.v_cache : op_.k_cache, is_last ? 0 : first + kLanes};
      each_group([&](auto rows, int64_t row, int64_t at) { score<rows.value>(row, at, block); });
    }
    std::memset(sums_, 0, rows_ * dim_ * sizeof(float));
    for (int64_t row = 0; row < rows_; row++)
      softmax(scores_ + row * padded_, before_ ? before_ + row * (dim_ + kLanes) : nullptr, sums_ + row * dim_,
              queries_ + row * dim_);
    if (before_) each_pair(sums_, [](Floats& a, Floats& b) { to_pair((const Value*)nullptr, a, b); });
    for (int64_t first = 0; first < padded_; first += kLanes) {
      const Block block{op_.v_cache, first, op_.v_cache, std::min(first + kLanes, padded_ - kLanes)};
      for (int64_t t = 0; t < kLanes && next_tokens_ > 0; t++, next_tokens_--) next_places_[t] = next_.next();
      each_group([&](auto rows, int64_t row, int64_t at) { add_values<rows.value>(row, at, block); });
    }
    each_pair(sums_, [](Floats& a, Floats& b) { from_pair((const Value*)nullptr, a, b); });
    for (int64_t i = 0; i < rows_ * dim_; i += kLanes) store(out + i, load<Floats>(sums_ + i) * queries_[i / dim_ * dim_]);
  }

 private:
  typedef typename Cache::Value Value;
  template <int kRows>
  using Rows = std::integral_constant<int, kRows>;

  // Sixteen tokens of one cache, and those that come after them: pages lie anywhere, so the processor does not foresee it.
  struct Block {
    const void* cache;
    int64_t first;
    const void* next_cache;
    int64_t next_first;
  };

  // work(Rows, row, column) for a few rows at a time that share the key-value head which begins at that column.
  template <class Work>
  void each_group(Work work) const {
    for (int64_t row = 0, at = 0; row < rows_; at += dim_) {
      const int64_t end = row + group_;
      for (; row + 4 <= end; row += 4) work(Rows<4>(), row, at);
      for (; row + 3 <= end; row += 3) work(Rows<3>(), row, at);
      for (; row + 2 <= end; row += 2) work(Rows<2>(), row, at);
      for (; row < end; row++) work(Rows<1>(), row, at);
    }
  }

  template <class Change>
  void each_pair(float* rows, Change change) const {
    for (int64_t row = 0; row < rows_; row++)
      for (int64_t d = 0; d + 2 * kLanes <= dim_; d += 2 * kLanes) {
        float* place = rows + row * dim_ + d;
        Floats a = load<Floats>(place), b = load<Floats>(place + kLanes);
        change(a, b);
        store(place, a), store(place + kLanes, b);
      }
  }

  // n columns of a token, before they are needed, to the first cache or the second. All at once would be more than the
  // processor can wait for.
  template <int kCache>
  void fetch(const void* cache, int64_t token, int64_t at, int64_t n) const {
    fetch<kCache>((const Value*)cache + places_[token] + at, n);
  }
  template <int kCache>
  static void fetch(const Value* place, int64_t n) {
    for (int64_t d = 0; d < n; d += 64 / (int64_t)sizeof(Value)) __builtin_prefetch(place + d, 0, 4 - kCache);
  }

  template <int kRows>
  void score(int64_t row, int64_t at, const Block& block) const {
    constexpr int kTokens = 4;
    const float* queries = queries_ + row * dim_;
    Floats products[kRows][kLanes];
    for (int t = 0; t < kLanes; t += kTokens) {
      Floats acc[kRows][kTokens] = {};
      const Value* keys[kTokens];
      for (int i = 0; i < kTokens; i++) {
        keys[i] = (const Value*)block.cache + places_[block.first + t + i] + at;
        fetch<1>(block.next_cache, block.next_first + t + i, at, dim_);
        fetch<2>(op_.v_cache, block.first + t + i, at, dim_);  // memory would idle else until scores are weights
      }
      int64_t d = 0;
      for (; d + 2 * kLanes <= dim_; d += 2 * kLanes)
        for (int i = 0; i < kTokens; i++) {
          Floats one, two;
          get_pair(keys[i] + d, one, two);
          for (int r = 0; r < kRows; r++) {
            acc[r][i] += one * load<Floats>(queries + r * dim_ + d);
            acc[r][i] += two * load<Floats>(queries + r * dim_ + d + kLanes);
          }
        }
      if (d < dim_)
        for (int i = 0; i < kTokens; i++)
          for (int r = 0; r < kRows; r++) acc[r][i] += Cache::get(keys[i] + d) * load<Floats>(queries + r * dim_ + d);
      for (int r = 0; r < kRows; r++)
        for (int i = 0; i < kTokens; i++) products[r][t + i] = acc[r][i];
    }
    for (int r = 0; r < kRows; r++) {
      Floats scores = sums_of(products[r]);
      if (op_.softcap != 0) scores = capped(scores, op_.softcap);
      store(scores_ + (row + r) * padded_ + block.first, scores);
    }
  }

  // Scores become weights, sums those of before; share: what is to be multiplied by in the end.
  void softmax(float* row, const float* before, float* sums, float* share) const {
    for (int64_t t = seen_; t < padded_; t++) row[t] = -INFINITY;
    Floats top = load<Floats>(row), totals{};
    for (int64_t t = kLanes; t < padded_; t += kLanes) top = larger(load<Floats>(row + t), top);
    for (int i = kLanes / 2; i > 0; i /= 2)
      for (int lane = 0; lane < i; lane++) top[lane] = std::max(top[lane], top[lane + i]);
    float shrink = 0;
    if (before) {
      top[0] = std::max(top[0], before[dim_]);
      shrink = std::exp(before[dim_] - top[0]);
      for (int64_t d = 0; d < dim_; d += kLanes) store(sums + d, load<Floats>(before + d) * shrink);
    }
    for (int64_t t = 0; t < padded_; t += kLanes) store(row + t, exp(load<Floats>(row + t) - top[0]));
    for (int64_t t = seen_; t < padded_; t++) row[t] = 0;
    for (int64_t t = 0; t < padded_; t += kLanes) totals += load<Floats>(row + t);
    *share = 1.0f / (sum(totals) + (before ? before[dim_ + 1] * shrink : 0));
  }

  template <int kRows>
  void add_values(int64_t row, int64_t at, const Block& block) const {
    int64_t d = 0;
    for (; d + 4 * kLanes <= dim_; d += 4 * kLanes) add_columns<kRows, 4>(row, at, d, block);
    for (; d + 2 * kLanes <= dim_; d += 2 * kLanes) add_columns<kRows, 2>(row, at, d, block);
    if (d < dim_) add_columns<kRows, 1>(row, at, d, block);
  }

  template <int kRows, int kVectors>
  void add_columns(int64_t row, int64_t at, int64_t d, const Block& block) const {
    float* sums = sums_ + row * dim_ + d;
    Floats acc[kRows][kVectors];
    for (int r = 0; r < kRows; r++)
      for (int i = 0; i < kVectors; i++) acc[r][i] = load<Floats>(sums + r * dim_ + i * kLanes);
    for (int64_t t = 0; t < kLanes; t++) {
      fetch<1>(block.next_cache, block.next_first + t, at + d, kVectors * kLanes);
      fetch<2>((const Value*)op_.k_cache + next_places_[t] + at + d, kVectors * kLanes);  // memory would idle else
      const Value* values = (const Value*)block.cache + places_[block.first + t] + at + d;
      Floats part[kVectors];
      if constexpr (kVectors == 1)
        part[0] = Cache::get(values);
      else
        for (int i = 0; i < kVectors; i += 2) get_pair(values + i * kLanes, part[i], part[i + 1]);
      for (int r = 0; r < kRows; r++) {
        const Floats weight = spread(scores_[(row + r) * padded_ + block.first + t]);
        for (int i = 0; i < kVectors; i++) acc[r][i] += part[i] * weight;
      }
    }
    for (int r = 0; r < kRows; r++)
      for (int i = 0; i < kVectors; i++) store(sums + r * dim_ + i * kLanes, acc[r][i]);
  }

  const Op& op_;
  const int64_t seen_;
  const float* const before_;
  const int64_t padded_, group_, rows_, dim_;
  float *const queries_, *const sums_;  // [rows][dim], 32 values as get_pair has them
  float* const scores_;                 // [rows][padded]
  Places next_;
  int64_t next_tokens_, next_places_[kLanes] = {};
  const int64_t* const places_;         // [padded] of keys and values; those after the last token repeat it, with weight 0
};

}  // namespace
