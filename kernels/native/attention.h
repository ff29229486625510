// Rotary embedding, the cache, and attention over its pages.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "activations.h"
#include "interface.h"

namespace {

// ---- Rotary embedding and the cache ----

void store_cached(const float* x, int64_t n, bool as_bf16, void* cache, int64_t at) {
  for (int64_t i = 0; i < n; i += kLanes) {
    if (as_bf16)
      store((uint16_t*)cache + at + i, to_bf16(load<Floats>(x + i)));
    else
      store((float*)cache + at + i, load<Floats>(x + i));
  }
}

void norm_and_rotate(const float* x, const Op& op, const float* norm, const float* cos_sin, float* out) {
  const int half = op.rotary_dim / 2;
  if (norm)
    rms_norm(x, norm, op.eps, op.head_dim, out);
  else
    std::memcpy(out, x, op.head_dim * sizeof(float));
  for (int i = 0; i < half; i++) {
    const float first = out[i], second = out[i + half];
    out[i] = first * cos_sin[i] - second * cos_sin[i + half];
    out[i + half] = second * cos_sin[i] + first * cos_sin[i + half];
  }
}

// One token: in [(q_heads + 2 kv_heads) * head_dim] -> out [q_heads * head_dim], keys and values to the token's slot.
void rope_store(const Op& op, const Step& step, int64_t token, float* head) {
  const int64_t dim = op.head_dim, slot = step.slots[token];
  const float* x = op.in + token * (op.q_heads + 2 * op.kv_heads) * dim;
  const float* cos_sin = op.cos_sin + (int64_t)step.positions[token] * op.rotary_dim;
  for (int64_t h = 0; h < op.q_heads; h++)
    norm_and_rotate(x + h * dim, op, op.q_norm, cos_sin, op.out + (token * op.q_heads + h) * dim);
  if (slot < 0) return;
  for (int64_t h = 0; h < op.kv_heads; h++) {
    norm_and_rotate(x + (op.q_heads + h) * dim, op, op.k_norm, cos_sin, head);
    store_cached(head, dim, op.cache_bf16, op.k_cache, (slot * op.kv_heads + h) * dim);
    store_cached(x + (op.q_heads + op.kv_heads + h) * dim, dim, op.cache_bf16, op.v_cache, (slot * op.kv_heads + h) * dim);
  }
}

// ---- Attention ----

// Where a sequence's keys and values of one head lie, token after token: walks its pages without dividing.
class Places {
 public:
  Places(const Op& op, const Step& step, int64_t sequence, int64_t kv_head, int64_t token)
      : page_(step.page_table + step.rows[sequence] * step.table_stride + token / op.page_size),
        offset_(token % op.page_size), page_size_(op.page_size), stride_((int64_t)op.kv_heads * op.head_dim),
        head_(kv_head * op.head_dim) {}

  int64_t next() {
    const int64_t place = (*page_ * page_size_ + offset_) * stride_ + head_;
    if (++offset_ == page_size_) {
      offset_ = 0;
      page_++;
    }
    return place;
  }

 private:
  const int32_t* page_;
  int64_t offset_;
  const int64_t page_size_, stride_, head_;
};

struct Bf16Cache {
  typedef uint16_t Value;
  static constexpr bool kIsBf16 = true;
  static Floats get(const uint16_t* p) { return from_bf16(load<Halves>(p)); }
};
struct Fp32Cache {
  typedef float Value;
  static constexpr bool kIsBf16 = false;
  static Floats get(const float* p) { return load<Floats>(p); }
};

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

// softcap * tanh(scores / softcap)
inline Floats capped(Floats scores, float softcap) {
  return softcap * (1.0f - 2.0f / (exp(scores * (2.0f / softcap)) + 1.0f));
}

// One query of the heads that share a key-value head: sees tokens first_seen .. kv_len - 1. q, out [group][dim]; scores
// and places: room for [group][tokens seen, rounded up to 16] and for as many tokens.
template <class Cache>
class Query {
 public:
  Query(const Op& op, const Step& step, int64_t sequence, int64_t kv_head, int64_t kv_len, float* scores, int64_t* places)
      : op_(op), first_seen_(std::max<int64_t>(0, kv_len - op.window)), seen_(kv_len - first_seen_),
        padded_((seen_ + kLanes - 1) / kLanes * kLanes), group_(op.q_heads / op.kv_heads), dim_(op.head_dim),
        scores_(scores), places_(places) {
    Places walk(op, step, sequence, kv_head, first_seen_);
    for (int64_t t = 0; t < padded_; t++) places[t] = t < seen_ ? walk.next() : places[t - 1];
  }

  // Pages lie anywhere, so the processor does not see which keys come next.
  void attend(const float* q, float* out) {
    for (int64_t first = 0; first < seen_; first += kLanes) {
      const int64_t after = std::min(first + 2 * kLanes, seen_);
      for (int64_t t = first + kLanes; t < after; t++) fetch_early(op_.k_cache, t, 0, dim_);
      score(q, first);
    }
    for (int64_t g = 0; g < group_; g++) softmax(scores_ + g * padded_);
    int64_t g = 0;
    for (; g + 4 <= group_; g += 4) add_values<4>(g, out + g * dim_);
    for (; g + 3 <= group_; g += 3) add_values<3>(g, out + g * dim_);
    for (; g + 2 <= group_; g += 2) add_values<2>(g, out + g * dim_);
    for (; g < group_; g++) add_values<1>(g, out + g * dim_);
  }

 private:
  typedef typename Cache::Value Value;

  // Columns d .. d + n - 1 of token t, before they are needed. All at once would be more than the processor can wait for.
  void fetch_early(const void* cache, int64_t t, int64_t d, int64_t n) const {
    const Value* place = (const Value*)cache + places_[t] + d;
    for (int64_t i = 0; i < n; i += 64 / (int64_t)sizeof(Value)) __builtin_prefetch(place + i);
  }

  void score(const float* q, int64_t first) {
    const int64_t* places = places_ + first;
    for (int64_t g = 0; g < group_; g++) {
      Floats acc[kLanes] = {};
      if (Cache::kIsBf16 && kFastDot2 && dim_ % (2 * kLanes) == 0) {
        for (int64_t i = 0; i < dim_; i += 2 * kLanes) {
          Halves part[2];
          for (int half = 0; half < 2; half++) part[half] = to_bf16(load<Floats>(q + g * dim_ + i + half * kLanes));
          for (int t = 0; t < kLanes; t++)
            acc[t] = dot2(acc[t], load<Ints>((const Value*)op_.k_cache + places[t] + i), load<Ints>(part));
        }
      } else {
        for (int64_t i = 0; i < dim_; i += kLanes) {
          const Floats part = load<Floats>(q + g * dim_ + i);
          for (int t = 0; t < kLanes; t++) acc[t] += part * Cache::get((const Value*)op_.k_cache + places[t] + i);
        }
      }
      Floats scores = sums_of(acc) * op_.score_scale;
      if (op_.softcap != 0) scores = capped(scores, op_.softcap);
      store(scores_ + g * padded_ + first, scores);
    }
  }

  void softmax(float* row) const {
    for (int64_t t = seen_; t < padded_; t++) row[t] = -INFINITY;
    Floats largest = load<Floats>(row);
    for (int64_t t = kLanes; t < padded_; t += kLanes) {
      const Floats scores = load<Floats>(row + t);
      largest = scores > largest ? scores : largest;
    }
    float top = largest[0];
    for (int i = 1; i < kLanes; i++) top = std::max(top, largest[i]);
    Floats totals{};
    for (int64_t t = 0; t < padded_; t += kLanes) {
      const Floats scores = load<Floats>(row + t);
      const Floats weights = scores > -INFINITY ? exp(scores - top) : scores - scores;  // NaN stays NaN
      store(row + t, weights);
    }
    for (int64_t t = seen_; t < padded_; t++) row[t] = 0;
    for (int64_t t = 0; t < padded_; t += kLanes) totals += load<Floats>(row + t);
    const float share = 1.0f / sum(totals);
    for (int64_t t = 0; t < padded_; t += kLanes) store(row + t, load<Floats>(row + t) * share);
  }

  template <int kHeads>
  void add_values(int64_t g, float* out) const {
    int64_t d = 0;
    for (; d + 4 * kLanes <= dim_; d += 4 * kLanes) add_columns<kHeads, 4>(g, d, out + d);
    for (; d < dim_; d += kLanes) add_columns<kHeads, 1>(g, d, out + d);
  }

  // Sums of all tokens stay in registers: enough of them that none waits for the one before.
  template <int kHeads, int kVectors>
  void add_columns(int64_t g, int64_t d, float* out) const {
    Floats acc[kHeads][kVectors] = {};
    for (int64_t t = 0; t < seen_; t++) {
      if (t + kLanes < seen_) fetch_early(op_.v_cache, t + kLanes, d, kVectors * kLanes);
      const Value* value = (const Value*)op_.v_cache + places_[t] + d;
      Floats weight[kHeads];
      for (int h = 0; h < kHeads; h++) weight[h] = spread(scores_[(g + h) * padded_ + t]);
      for (int i = 0; i < kVectors; i++) {
        const Floats part = Cache::get(value + i * kLanes);
        for (int h = 0; h < kHeads; h++) acc[h][i] += part * weight[h];
      }
    }
    for (int h = 0; h < kHeads; h++)
      for (int i = 0; i < kVectors; i++) store(out + h * dim_ + i * kLanes, acc[h][i]);
  }

  const Op& op_;
  const int64_t first_seen_, seen_;
  const int64_t padded_, group_, dim_;
  float* scores_;          // [group][padded]
  const int64_t* places_;  // [padded] of keys and values; those after the last token repeat it, with weight 0
};

// Queries of a chunk, block by block of keys (FlashAttention, arXiv 2205.14135). A vector holds one value of 16 rows, a row
// being a query and one of the heads that share a key-value head: so no sum or maximum runs across a vector. A Block
// says how queries, keys and values lie (start, fetch) and how kKeys of them are multiplied (add_keys).
template <class Block>
class ChunkRows {
 public:
  static constexpr int64_t kVectors = 4, kRows = kVectors * kLanes;

  static int64_t queries(const Op& op) { return std::max<int64_t>(1, kRows / (op.q_heads / op.kv_heads)); }

  void attend() {
    Block& block = static_cast<Block&>(*this);
    const int64_t vectors = (rows_ + kLanes - 1) / kLanes;
    for (int64_t v = 0; v < vectors; v++) {
      reset(v);
      block.start(v);
    }
    const int64_t first_key = std::max<int64_t>(0, position_ - op_.window + 1);
    Places places(op_, step_, sequence_, kv_head_, first_key);
    for (int64_t key = first_key; key <= last_; key += Block::kKeys) {
      block.fetch(key, places);
      block.add_keys(vectors, key);
    }
    for (int64_t row = 0; row < rows_; row++) {
      const float share = 1.0f / totals_[row / kLanes][row % kLanes];
      float* to = op_.out + place(row);
      for (int64_t d = 0; d < dim_; d++) to[d] = out_[(row / kLanes * dim_ + d) * kLanes + row % kLanes] * share;
    }
  }

 protected:
  ChunkRows(const Op& op, const Step& step, int64_t sequence, int64_t kv_head, int64_t first, int64_t count, float* out)
      : op_(op), step_(step), sequence_(sequence), kv_head_(kv_head), first_(first),
        group_(op.q_heads / op.kv_heads), rows_(count * group_), dim_(op.head_dim),
        position_(step.kv_lens[sequence] - (step.query_starts[sequence + 1] - first)), last_(position_ + count - 1),
        out_(out) {}

  int64_t place(int64_t row) const {
    return ((first_ + row / group_) * op_.q_heads + kv_head_ * group_ + row % group_) * dim_;
  }

  // The rows that fill the last vector repeat the last one.
  int64_t row_of(int64_t v, int64_t lane) const { return std::min(v * kLanes + lane, rows_ - 1); }

  void mask_unseen(int64_t v, int64_t first, Floats* scores) const {
    if (first + Block::kKeys - 1 <= position_ && first > last_ - op_.window) return;
    const int32_t window = (int32_t)std::min<int64_t>(op_.window, INT32_MAX / 2);
    for (int64_t k = 0; k < Block::kKeys; k++) {
      const Ints distance = positions_[v] - (int32_t)(first + k);
      scores[k] = (distance >= 0) & (distance < window) ? scores[k] : spread(-INFINITY);
    }
  }

  const Op& op_;
  const Step& step_;
  const int64_t sequence_, kv_head_, first_, group_, rows_, dim_;
  const int64_t position_, last_;  // of the first and the last query
  float* const out_;               // [kVectors][dim][16]
  Floats tops_[kVectors], totals_[kVectors];

 private:
  void reset(int64_t v) {
    for (int64_t lane = 0; lane < kLanes; lane++) positions_[v][lane] = (int32_t)(position_ + row_of(v, lane) / group_);
    std::memset(out_ + v * dim_ * kLanes, 0, dim_ * sizeof(Floats));
    tops_[v] = spread(-1e30f);  // finite: a window may leave a row none of the first keys
    totals_[v] = Floats{};
  }

  Ints positions_[kVectors];
};

// In fp32, for any kind of cache.
template <class Cache>
class QueryBlock : public ChunkRows<QueryBlock<Cache>> {
  typedef ChunkRows<QueryBlock> Base;
  friend Base;

 public:
  static constexpr int64_t kKeys = 32, kTogether = 8;
  using Base::kRows;

  static size_t room(const Op& op) { return op.head_dim * (2 * kKeys + 2 * kRows); }

  QueryBlock(const Op& op, const Step& step, int64_t sequence, int64_t kv_head, int64_t first, int64_t count, float* room)
      : Base(op, step, sequence, kv_head, first, count, room + op.head_dim * (2 * kKeys + kRows)),
        keys_(room), values_(keys_ + kKeys * dim_), queries_(values_ + kKeys * dim_) {}

 private:
  typedef typename Cache::Value Value;
  using Base::dim_, Base::last_, Base::op_, Base::out_, Base::tops_, Base::totals_;

  // Queries with rows side by side, scaled.
  void start(int64_t v) {
    for (int64_t lane = 0; lane < kLanes; lane++) {
      const float* q = op_.in + this->place(this->row_of(v, lane));
      for (int64_t d = 0; d < dim_; d++) queries_[(v * dim_ + d) * kLanes + lane] = q[d] * op_.score_scale;
    }
  }

  // Keys and values in fp32; those after the last one repeat it, and are masked.
  void fetch(int64_t first, Places& places) {
    int64_t at = 0;
    for (int64_t k = 0; k < kKeys; k++) {
      if (first + k <= last_) at = places.next();
      for (int64_t d = 0; d < dim_; d += kLanes) {
        store(keys_ + k * dim_ + d, Cache::get((const Value*)op_.k_cache + at + d));
        store(values_ + k * dim_ + d, Cache::get((const Value*)op_.v_cache + at + d));
      }
    }
  }

  void add_keys(int64_t vectors, int64_t first) {
    for (int64_t v = 0; v < vectors; v++) add_block(v, first);
  }

  void add_block(int64_t v, int64_t first) {
    Floats scores[kKeys];
    const float* queries = queries_ + v * dim_ * kLanes;
    for (int64_t k = 0; k < kKeys; k += kTogether) {
      Floats acc[kTogether] = {};
      for (int64_t d = 0; d < dim_; d++) {
        const Floats q = load<Floats>(queries + d * kLanes);
        for (int64_t i = 0; i < kTogether; i++) acc[i] += q * keys_[(k + i) * dim_ + d];
      }
      for (int64_t i = 0; i < kTogether; i++) scores[k + i] = acc[i];
    }
    if (op_.softcap != 0)
      for (Floats& score : scores) score = capped(score, op_.softcap);
    this->mask_unseen(v, first, scores);
    const Floats top = weigh(v, scores);
    const Floats shrink = exp(tops_[v] - top);
    tops_[v] = top;
    totals_[v] *= shrink;
    for (const Floats& weight : scores) totals_[v] += weight;
    float* out = out_ + v * dim_ * kLanes;
    for (int64_t d = 0; d < dim_; d += kTogether) {
      Floats acc[kTogether];
      for (int64_t i = 0; i < kTogether; i++) acc[i] = load<Floats>(out + (d + i) * kLanes) * shrink;
      for (int64_t k = 0; k < kKeys; k++)
        for (int64_t i = 0; i < kTogether; i++) acc[i] += scores[k] * values_[k * dim_ + d + i];
      for (int64_t i = 0; i < kTogether; i++) store(out + (d + i) * kLanes, acc[i]);
    }
  }

  // Scores become weights; returns their row's maximum so far.
  Floats weigh(int64_t v, Floats* scores) const {
    Floats top = tops_[v];
    for (int64_t k = 0; k < kKeys; k++) top = scores[k] > top ? scores[k] : top;
    for (int64_t k = 0; k < kKeys; k++) scores[k] = exp(scores[k] - top);
    return top;
  }

  float *keys_, *values_;  // [kKeys][dim]
  float* queries_;         // [kVectors][dim][16]
};

}  // namespace
