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
  const int64_t place = slot / op.page_size * op.page_stride + slot % op.page_size * op.kv_heads * dim;
  for (int64_t h = 0; h < op.kv_heads; h++) {
    norm_and_rotate(x + (op.q_heads + h) * dim, op, op.k_norm, cos_sin, head);
    store_cached(head, dim, op.cache_bf16, op.k_cache, place + h * dim);
    store_cached(x + (op.q_heads + op.kv_heads + h) * dim, dim, op.cache_bf16, op.v_cache, place + h * dim);
  }
}

// ---- Attention ----

// Where a sequence's keys and values of one head lie, token after token: walks its pages without dividing.
class Places {
 public:
  Places(const Op& op, const Step& step, int64_t sequence, int64_t kv_head, int64_t token)
      : page_(step.page_table + step.rows[sequence] * step.table_stride + token / op.page_size),
        offset_(token % op.page_size), page_size_(op.page_size), page_stride_(op.page_stride),
        stride_((int64_t)op.kv_heads * op.head_dim), head_(kv_head * op.head_dim) {}

  int64_t next() {
    const int64_t place = *page_ * page_stride_ + offset_ * stride_ + head_;
    if (++offset_ == page_size_) {
      offset_ = 0;
      page_++;
    }
    return place;
  }

 private:
  const int32_t* page_;
  int64_t offset_;
  const int64_t page_size_, page_stride_, stride_, head_;
};

struct Bf16Cache {
  typedef uint16_t Value;
  static Floats get(const uint16_t* p) { return from_bf16(load<Halves>(p)); }
};
struct Fp32Cache {
  typedef float Value;
  static Floats get(const float* p) { return load<Floats>(p); }
};

// softcap * tanh(scores / softcap)
inline Floats capped(Floats scores, float softcap) {
  return softcap * (1.0f - 2.0f / (exp(scores * (2.0f / softcap)) + 1.0f));
}

// Queries that are taken together: some of a chunk, or decodes that begin with the same keys, which all of them see.
struct Queries {
  int64_t sequence, count;
  int64_t position, first;  // of the first one, and its token
  const int32_t* decodes;   // or the tokens of all; null in a chunk

  int64_t token(int64_t i) const { return decodes ? decodes[i] : first + i; }
  int64_t position_of(int64_t i) const { return decodes ? position : position + i; }
};

// What a decode's heads have from its first keys: sums of values, in the end the largest score and the weights' total.
struct PrefixSums {
  float* sums;
  int64_t q_heads, dim;

  static size_t room(const Op& op) { return op.q_heads * (op.head_dim + kLanes); }
  float* of(int64_t decode, int64_t head) const { return sums + (decode * q_heads + head) * (dim + kLanes); }
};

// Queries, block by block of keys (FlashAttention, arXiv 2205.14135). A vector holds one value of 16 rows, a row
// being a query and one of the heads that share a key-value head: so no sum or maximum runs across a vector. A Block
// says how queries, keys and values lie (start, fetch) and how kKeys of them are multiplied (add_keys).
template <class Block>
class ChunkRows {
 public:
  static constexpr int64_t kVectors = 24, kRows = kVectors * kLanes;

  // How many have a block, of so many in all chunks: keys and values are fetched for each block, but all threads want some.
  static int64_t queries(const Op& op, int64_t all, int threads) {
    constexpr int64_t kFewestRows = 64, kBlocksPerThread = 4;
    const int64_t fair = all * op.q_heads / (kBlocksPerThread * threads), group = op.q_heads / op.kv_heads;
    return std::max<int64_t>(1, std::clamp(fair, kFewestRows, kRows) / group);
  }

  void attend() {
    Block& block = static_cast<Block&>(*this);
    const int64_t vectors = (rows_ + kLanes - 1) / kLanes;
    for (int64_t v = 0; v < vectors; v++) {
      reset(v);
      block.start(v);
    }
    const int64_t first_key = std::max<int64_t>(0, position_ - op_.window + 1);
    Places places(op_, step_, queries_.sequence, kv_head_, first_key);
    for (int64_t key = first_key; key <= last_; key += Block::kKeys) {
      block.fetch(key, places);
      block.add_keys(vectors, key);
    }
  }

  void put(const Results& to) const {
    each_part([&](int64_t v) { return Block::kExcess / totals_[v]; },
              [&](int64_t row, int64_t d, Floats part) { to.put(token(row), head(row) * dim_ + d, part); });
  }

  // As they are, for decodes that see further keys.
  void put(const PrefixSums& to) const {
    each_part([](int64_t) { return spread(1.0f); },
              [&](int64_t row, int64_t d, Floats part) { store(to.of(token(row), head(row)) + d, part); });
    for (int64_t row = 0; row < rows_; row++) {
      float* ends = to.of(token(row), head(row)) + dim_;
      ends[0] = tops_[row / kLanes][row % kLanes] * Block::kUnit;
      ends[1] = totals_[row / kLanes][row % kLanes] / Block::kExcess;
    }
  }

 protected:
  ChunkRows(const Op& op, const Step& step, const Queries& queries, int64_t kv_head, float* out)
      : op_(op), step_(step), queries_(queries), kv_head_(kv_head), group_(op.q_heads / op.kv_heads),
        rows_(queries.count * group_), dim_(op.head_dim), position_(queries.position),
        last_(queries.position_of(queries.count - 1)), out_(out) {}

  int64_t token(int64_t row) const { return queries_.token(row / group_); }
  int64_t head(int64_t row) const { return kv_head_ * group_ + row % group_; }
  int64_t place(int64_t row) const { return (token(row) * op_.q_heads + head(row)) * dim_; }

  // The rows that fill the last vector repeat the last one.
  int64_t row_of(int64_t v, int64_t lane) const { return std::min(v * kLanes + lane, rows_ - 1); }

  // How many keys from this one on some row of the vector sees, if none is hidden by its window.
  int64_t seen_from(int64_t v, int64_t first) const { return positions_[v][kLanes - 1] - first + 1; }

  void mask_unseen(int64_t v, int64_t first, int64_t count, Floats* scores) const {
    if (first + count - 1 <= positions_[v][0] && first > positions_[v][kLanes - 1] - op_.window) return;
    const uint32_t window = (uint32_t)std::min<int64_t>(op_.window, INT32_MAX / 2);
    for (int64_t k = 0; k < count; k++) {
      const Bits distance = (Bits)(positions_[v] - (int32_t)(first + k));  // of a key that comes later: huge
      scores[k] = distance < window ? scores[k] : spread(-INFINITY);
    }
  }

  const Op& op_;
  const Step& step_;
  const Queries queries_;
  const int64_t kv_head_, group_, rows_, dim_;
  const int64_t position_, last_;  // of the first and the last query
  float* const out_;               // [kVectors][dim][16]
  Floats tops_[kVectors], totals_[kVectors];

 private:
  // work(row, d, sums of dimensions d .. d + 15) for all, after each vector of rows was multiplied by factors(vector).
  template <class Factors, class Work>
  void each_part(Factors factors, Work work) const {
    for (int64_t v = 0; v * kLanes < rows_; v++) {
      const Floats times = factors(v);
      for (int64_t d = 0; d < dim_; d += kLanes) {
        Floats parts[kLanes];
        for (int64_t i = 0; i < kLanes; i++) parts[i] = load<Floats>(out_ + (v * dim_ + d + i) * kLanes) * times;
        transpose(parts);
        for (int64_t lane = 0, row = v * kLanes; lane < kLanes && row < rows_; lane++, row++) work(row, d, parts[lane]);
      }
    }
  }

  void reset(int64_t v) {
    for (int64_t lane = 0; lane < kLanes; lane++)
      positions_[v][lane] = (int32_t)queries_.position_of(row_of(v, lane) / group_);
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
  static constexpr float kExcess = 1.0f, kUnit = 1.0f;
  using Base::kRows;

  static size_t room(const Op& op) { return op.head_dim * (2 * kKeys + 2 * kRows); }

  QueryBlock(const Op& op, const Step& step, const Queries& queries, int64_t kv_head, float* room)
      : Base(op, step, queries, kv_head, room + op.head_dim * (2 * kKeys + kRows)),
        keys_(room), values_(keys_ + kKeys * dim_), scaled_(values_ + kKeys * dim_) {}

 private:
  typedef typename Cache::Value Value;
  using Base::dim_, Base::last_, Base::op_, Base::out_, Base::tops_, Base::totals_;

  // Queries with rows side by side, scaled.
  void start(int64_t v) {
    for (int64_t lane = 0; lane < kLanes; lane++) {
      const float* q = op_.in + this->place(this->row_of(v, lane));
      for (int64_t d = 0; d < dim_; d++) scaled_[(v * dim_ + d) * kLanes + lane] = q[d] * op_.score_scale;
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
    for (int64_t v = 0; v < vectors; v++)
      if (this->seen_from(v, first) > 0) add_block(v, first);
  }

  void add_block(int64_t v, int64_t first) {
    Floats scores[kKeys];
    const float* queries = scaled_ + v * dim_ * kLanes;
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
    this->mask_unseen(v, first, kKeys, scores);
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
  float* scaled_;          // [kVectors][dim][16]: queries
};

}  // namespace
