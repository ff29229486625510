// What native_library.py and native_ops.py mirror.

#pragma once

#include <cstdint>

namespace {

enum WeightKind : int32_t { kQ4 = 0, kQ8 = 1, kBf16 = 2 };
enum OpKind : int32_t { kLinear = 0, kRopeStore = 1, kAttend = 2, kNorm = 3, kEmbed = 4, kGate = 5, kSum = 6 };
enum Epilogue : int32_t { kPut = 0, kAdd = 1, kSiluMul = 2, kGeluMul = 3 };  // the last of kGate only

}  // namespace

extern "C" {

struct Op {
  int32_t kind;         // OpKind
  int32_t weight_kind;  // WeightKind
  int32_t epilogue;     // Epilogue: what becomes of a product; gated ones have weights [2 out, in], first the gates
  int32_t cache_bf16;   // else fp32
  int64_t rows, cols;   // of the weight
  const uint8_t* weight;
  const float* bias;
  const float* norm;  // of kNorm, or before a kLinear; may be null there
  float eps;  // of norms; of kEmbed the factor of the rows
  int32_t rotary_dim;
  const float* in;  // [tokens, cols]
  float* out;
  const float* cos_sin;  // [positions, rotary_dim]
  const float* q_norm;
  const float* k_norm;
  void* k_cache;  // [pages, page_size, kv_heads, head_dim], a page at page_stride after the one before
  void* v_cache;
  int32_t q_heads, kv_heads, head_dim, page_size;
  float score_scale;  // of q . k
  float softcap;      // scores become softcap * tanh(score / softcap); 0: they do not
  int64_t window;     // tokens that a query sees, itself included
  int64_t page_stride;  // from a page of k_cache or v_cache to the next, in values
  int64_t handed_on;  // whether the output is the next operation's input and nothing else's, that being a kLinear without norm
};

struct Step {
  int64_t tokens, sequences;
  const int64_t* ids;
  const int32_t* positions;
  const int64_t* slots;
  const int32_t* rows;
  const int32_t* kv_lens;
  const int32_t* query_starts;
  const int32_t* page_table;
  int64_t table_stride;
  // Tiles of decodes that begin with the same pages (SharedTiles of shared_prefix.py); decodes are the first sequences.
  int64_t tiles, tile_members;
  const int32_t* own_lens;   // [decodes]: tokens behind the prefix
  const int32_t* tile_lens;  // [tiles]: tokens of the prefix
  const int32_t* members;    // [tiles, tile_members]: -1 behind them
};
}
