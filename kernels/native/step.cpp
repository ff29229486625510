// A decoder's forward pass on a CPU: products with weights that stay quantized, norms, rotary embedding, attention over
// paged keys and values. Plain C functions at the end are called through ctypes (native_library.py).
//
// A step is a list of operations over fp32 buffers that all threads walk through, so that Python is left once a step.
// Threads claim the items of an operation from a counter: when another process takes a core away, the others do its share.
//
// All is compiled for several instruction sets (native_library.py); vectors are GCC's generic ones, 16 lanes wide
// everywhere, and only what those cannot say uses intrinsics, with a plain version beside it.
//
// Weights [rows, cols] lie in panels of 16 rows, so that a vector holds one value of each row. A panel is a sequence of
// blocks of 32 columns; one block is
//   kQ4:   4 x 64 bytes of nibbles, then 16 scales d, then 16 minima m, both fp16: w = d q + m, q in 0..15
//   kQ8:   8 x 64 bytes q + 128, then 16 scales d, fp16: w = d q, q in -128..127
//   kBf16: 16 x 64 bytes, in each the bf16 pair of columns (2 i, 2 i + 1) of all rows
// Vector j of kQ4 holds columns 4 j .. 4 j + 3 of each row in the low nibbles and 16 columns later ones in the high; of
// kQ8 columns 4 j .. 4 j + 3. These are GGUF's Q4_0, Q4_1 and Q8_0 blocks with bytes in another order: nothing is lost.

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "attention.h"
#include "decode_attention.h"
#include "linear.h"
#include "threads.h"
#include "tile_attention.h"

namespace {

// Tiles are read whole, bf16 ones two at a time: there is room for as many rows as that takes.
int64_t padded_tokens(int64_t tokens) { return (tokens + 31) / 32 * 32; }

// Walks one thread through the operations.
class Walker {
 public:
  Walker(const Step& step, int threads, Scratch& shared, Scratch& own, bool has_tiles, Pulse& pulse)
      : step_(step), threads_(threads), shared_(shared), own_(own), has_tiles_(has_tiles), pulse_(pulse) {}

  // phases: two, of which most operations use the second only; before: the operation before, if any; op is not the last if
  // it hands its output on.
  void run(const Op& op, const Op* before, Phase* phases) {
    Phase& phase = phases[1];
    switch (op.kind) {
      case kLinear: return linear(op, before && hands_tiles(*before), phases[0], phase);
      case kRopeStore:
        phase.share(step_.tokens, 8, pulse_, [&](int64_t t) { rope_store(op, step_, t, own_.row.at_least(op.head_dim)); });
        return;
      case kAttend: return attend_all(op, phases[0], phase);
      case kNorm:
        phase.share(step_.tokens, 8, pulse_, [&](int64_t t) {
          rms_norm(op.in + t * op.cols, op.norm, op.eps, op.cols, op.out + t * op.cols);
        });
        return;
      case kEmbed:
        phase.share(step_.tokens, 8, pulse_, [&](int64_t t) { embed(op, t); });
        return;
      case kGate:
        phase.share(step_.tokens, 8, pulse_, [&](int64_t t) { gate(op, t); });
        return;
      case kSum:
        phase.share(step_.tokens, 8, pulse_, [&](int64_t t) { add(op.in + t * op.cols, op.cols, op.out + t * op.cols); });
        return;
    }
  }

 private:
  // Whether the output is made as tiles for the next operation.
  bool hands_tiles(const Op& op) const {
    return op.handed_on && choose_tiles(has_tiles_, (&op)[1].weight_kind, step_.tokens);
  }
  Results results(const Op& op, int64_t width) const {
    return {op.out, hands_tiles(op) ? shared_.handed.at_least(padded_tokens(step_.tokens) * width) : nullptr, width,
            op.epilogue == kAdd};
  }

  void prepare(const Op& op, int64_t token, bool as_bf16, const Activations& a) {
    const float* x = op.in + token * op.cols;
    if (as_bf16) return widen(x, op.norm, op.eps, token, a);
    if (op.norm) {
      float* normed = own_.row.at_least(op.cols);
      rms_norm(x, op.norm, op.eps, op.cols, normed);
      x = normed;
    }
    quantize(x, token, a);
  }

  void linear(const Op& op, bool has_input, Phase& preparing, Phase& phase);
  void attend_all(const Op& op, Phase& of_prefixes, Phase& phase);
  template <class Cache>
  void attend_cached(const Op& op, Phase& of_prefixes, Phase& phase);
  template <class Cache, class To>
  void attend_block(const Op& op, const Queries& queries, int64_t head, const To& to);
  template <class Cache>
  void attend_one(const Op& op, const Results& to, const PrefixSums& prefixes, const Decode& decode, const Decode& next);
  void embed(const Op& op, int64_t token);

  const Step& step_;
  const int threads_;
  Scratch& shared_;
  Scratch& own_;
  const bool has_tiles_;
  Pulse& pulse_;
};

// has_input: the operation before has made it, as tiles.
void Walker::linear(const Op& op, bool has_input, Phase& preparing, Phase& phase) {
  const Linear layer(op, results(op, op.epilogue == kSiluMul ? op.rows / 2 : op.rows));
  const int64_t tokens = step_.tokens;
  const bool by_tiles = choose_tiles(has_tiles_, op.weight_kind, tokens);
  const bool as_bf16 = by_tiles || op.weight_kind == kBf16;
  Activations a;
  if (has_input) {
    a.wide = shared_.handed.at_least(0);
  } else if (tokens == 1) {  // each thread for itself: cheaper than to wait for another
    a = own_.room(1, op.cols, false);
    prepare(op, 0, as_bf16, a);
  } else {
    a = shared_.room(padded_tokens(tokens), op.cols, by_tiles);
    preparing.share(tokens, 1 + tokens / 64, pulse_, [&](int64_t t) { prepare(op, t, as_bf16, a); });
  }
#if defined(HAS_TILES)
  if (by_tiles) {
    uint8_t* unpacked = (uint8_t*)own_.q.at_least(2 * layer.blocks * kBlockBytes[kBf16]);
    const int64_t step = layer.gated ? 1 : 2;
    const int64_t panels = (layer.out_panels + step - 1) / step, span = tokens_in_cache(op.cols);
    phase.share(panels * ((tokens + span - 1) / span), 1, pulse_, [&](int64_t i) {
      const int64_t first = i / panels * span;
      layer.by_tiles(i % panels * step, a, first, std::min(first + span, tokens), unpacked);
    });
    return;
  }
#endif
  const int64_t at_once = std::max<int64_t>(1, layer.out_panels / (8 * threads_));
  phase.share(layer.out_panels, at_once, pulse_, [&](int64_t p) { layer.by_vectors(p, a, tokens); });
}

void Walker::attend_all(const Op& op, Phase& of_prefixes, Phase& phase) {
  if (op.cache_bf16)
    attend_cached<Bf16Cache>(op, of_prefixes, phase);
  else
    attend_cached<Fp32Cache>(op, of_prefixes, phase);
}

// A piece of work is a key-value head of a block of queries or of a decode, but all heads of it if there are many. Before
// come those of prefixes that decodes share, each in a block of its own; a window would hide some of it from some of them.
template <class Cache>
void Walker::attend_cached(const Op& op, Phase& of_prefixes, Phase& phase) {
  PrefixSums prefixes{nullptr, op.q_heads, op.head_dim};
  if (step_.tiles && op.window >= step_.table_stride * op.page_size) {
    prefixes.sums = shared_.prefixes.at_least(0);
    of_prefixes.share(step_.tiles * op.kv_heads, 1, pulse_, [&](int64_t i) {
      const int64_t tile = i / op.kv_heads;
      const int32_t* members = step_.members + tile * step_.tile_members;
      const int64_t count = std::find(members, members + step_.tile_members, -1) - members;
      attend_block<Cache>(op, {members[0], count, step_.tile_lens[tile] - 1, 0, members}, i % op.kv_heads, prefixes);
    });
  }
  int64_t chunks = 0;  // tokens of all
  for (int64_t s = 0; s < step_.sequences; s++) {
    const int64_t queries = step_.query_starts[s + 1] - step_.query_starts[s];
    if (queries > 1) chunks += queries;
  }
  const int64_t per_block = QueryBlock<Cache>::queries(op, chunks, threads_);
  const bool are_many = step_.sequences >= 4 * threads_;
  const int64_t heads = are_many ? op.kv_heads : 1;
  int64_t* ends = own_.ends.at_least(step_.sequences);
  for (int64_t s = 0; s < step_.sequences; s++) {
    const int64_t queries = step_.query_starts[s + 1] - step_.query_starts[s];
    const int64_t pieces = queries > 1 ? (queries + per_block - 1) / per_block * op.kv_heads : op.kv_heads / heads;
    ends[s] = (s ? ends[s - 1] : 0) + pieces;
  }
  const Results to = results(op, (int64_t)op.q_heads * op.head_dim);
  const auto decode = [&](int64_t s, int64_t head) {
    const int64_t kv_len = step_.kv_lens[s], prefix = prefixes.sums ? kv_len - step_.own_lens[s] : 0;
    return Decode{s, head, heads, std::max(prefix, kv_len - op.window), kv_len};
  };
  const int64_t count = ends[step_.sequences - 1];
  if (are_many && !chunks)  // each a decode
    return phase.share_ahead(count, pulse_, [&](int64_t s, int64_t next) {
      attend_one<Cache>(op, to, prefixes, decode(s, 0), next < count ? decode(next, 0) : Decode{s});
    });
  phase.share(count, 1, pulse_, [&](int64_t task) {
    const int64_t s = std::upper_bound(ends, ends + step_.sequences, task) - ends;
    const int64_t number = task - (s ? ends[s - 1] : 0), head = number % op.kv_heads;
    const int64_t first = step_.query_starts[s] + number / op.kv_heads * per_block, end = step_.query_starts[s + 1];
    if (end - step_.query_starts[s] == 1) return attend_one<Cache>(op, to, prefixes, decode(s, head), Decode{s});
    attend_block<Cache>(op, {s, std::min(per_block, end - first), step_.kv_lens[s] - (end - first), first, nullptr}, head, to);
  });
}

// to: Results or PrefixSums.
template <class Cache, class To>
void Walker::attend_block(const Op& op, const Queries& queries, int64_t head, const To& to) {
  const auto attend = [&](auto block) {
    block.attend();
    block.put(to);
  };
#if defined(HAS_TILES)
  if (has_tiles_ && TileQueryBlock::fits(op))
    return attend(TileQueryBlock(op, step_, queries, head, own_.row.at_least(TileQueryBlock::room(op))));
#endif
  attend(QueryBlock<Cache>(op, step_, queries, head, own_.row.at_least(QueryBlock<Cache>::room(op))));
}

template <class Cache>
void Walker::attend_one(const Op& op, const Results& to, const PrefixSums& prefixes, const Decode& decode, const Decode& next) {
  const int64_t s = decode.sequence, token = step_.query_starts[s], group = op.q_heads / op.kv_heads;
  const int64_t column = decode.head * group * op.head_dim, width = decode.heads * group * op.head_dim;
  float* attended = to.tiles ? own_.attended.at_least(width) : op.out + token * to.width + column;
  const bool has_prefix = prefixes.sums && step_.own_lens[s] < decode.kv_len;
  const float* before = has_prefix ? prefixes.of(s, decode.head * group) : nullptr;
  float* room = own_.row.at_least(Query<Cache>::room(op, decode));
  int64_t* places = own_.places.at_least(decode.kv_len + kLanes);
  Query<Cache>(op, step_, decode, next, before, room, places).attend(op.in + token * to.width + column, attended);
  if (!to.tiles) return;
  for (int64_t d = 0; d < width; d += kLanes) to.put(token, column + d, load<Floats>(attended + d));
}

void Walker::embed(const Op& op, int64_t token) {
  const int64_t id = step_.ids[token], lane = id % kLanes, blocks = op.cols / kBlock;
  const uint8_t* w = op.weight + id / kLanes * blocks * kBlockBytes[op.weight_kind];
  float* out = op.out + token * op.cols;
  for (int64_t b = 0; b < blocks; b++, w += kBlockBytes[op.weight_kind], out += kBlock) {
    if (op.weight_kind == kBf16) {
      for (int i = 0; i < kBlock; i++) {
        const uint32_t bits = (uint32_t)load<uint16_t>(w + 64 * (i / 2) + 4 * lane + 2 * (i % 2)) << 16;
        std::memcpy(out + i, &bits, 4);
      }
      continue;
    }
    const bool is_q4 = op.weight_kind == kQ4;
    const float d = from_fp16(w + (is_q4 ? 256 : 512))[lane], m = is_q4 ? from_fp16(w + 288)[lane] : -128.0f * d;
    for (int i = 0; i < kBlock; i++) {
      const uint8_t byte = w[64 * (is_q4 ? i % 16 / 4 : i / 4) + 4 * lane + i % 4];
      out[i] = d * (float)(is_q4 ? (i < 16 ? byte & 15 : byte >> 4) : byte) + m;
    }
  }
  if (op.eps == 1.0f) return;
  for (int64_t i = 0; i < op.cols; i++) op.out[token * op.cols + i] *= op.eps;
}

// What outlives a step.
struct Engine {
  int threads;
  Pulse pulse;
  bool tiles = false;
  Scratch shared;
  std::vector<Scratch> own;
  std::vector<Phase> phases;
};

}  // namespace

extern "C" {

// pulse: see Pulse; may be null.
void* engine_new(int threads, void (*pulse)()) {
  auto engine = new Engine{threads, Pulse(pulse)};
  engine->own.resize(threads);
#if defined(HAS_TILES)
  engine->tiles = tiles_usable();
#endif
  return engine;
}

void engine_free(void* engine) { delete (Engine*)engine; }

// Run the operations in order. Buffers are sized by the caller; weights have cols % 32 == 0, heads dims % 16 == 0.
void run(void* handle, const Op* ops, int64_t count, const Step* step) {
  Engine& engine = *(Engine*)handle;
  if ((int64_t)engine.phases.size() < 2 * count) engine.phases = std::vector<Phase>(2 * count);
  for (Phase& phase : engine.phases) phase.reset();
  // Shared rooms grow before threads hold pointers into them.
  for (int64_t i = 0; i < count; i++) {
    if (ops[i].kind == kAttend && step->tiles) engine.shared.prefixes.at_least(step->sequences * PrefixSums::room(ops[i]));
    if (ops[i].kind != kLinear) continue;
    engine.shared.room(padded_tokens(step->tokens), ops[i].cols, true);
    engine.shared.handed.at_least(padded_tokens(step->tokens) * ops[i].cols);
  }
#pragma omp parallel num_threads(engine.threads)
  {
    const int thread = omp_get_thread_num();
#if defined(HAS_TILES)
    if (engine.tiles) configure_tiles();
#endif
    Pulse silent(nullptr), &pulse = thread == 0 ? engine.pulse : silent;
    Walker walker(*step, engine.threads, engine.shared, engine.own[thread], engine.tiles, pulse);
    for (int64_t i = 0; i < count; i++) walker.run(ops[i], i ? &ops[i - 1] : nullptr, &engine.phases[2 * i]);
#if defined(HAS_TILES)
    if (engine.tiles) _tile_release();
#endif
  }
}
}
