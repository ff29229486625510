// Linear layers with what follows them: bias, activation, residual stream.

#pragma once

#include <algorithm>
#include <cstdint>

#include "dots.h"
#include "interface.h"
#include "tiles.h"

namespace {

inline Floats activate(int32_t epilogue, Floats gate) {
  if (epilogue == kSiluMul) return gate * reciprocal(1.0f + exp(-gate));
  // GELU by tanh, which is a sigmoid of twice its argument.
  const Floats inner = 1.5957691216f * (gate + 0.044715f * gate * gate * gate);
  return gate * reciprocal(1.0f + exp(-inner));
}

// Panel p of the output and, in gated products, its partner that is multiplied with it.
struct Linear {
  const Op& op;
  const Results results;
  const bool gated;
  const int64_t blocks, panel_bytes, out_rows, out_panels;

  Linear(const Op& o, const Results& to)
      : op(o),
        results(to),
        gated(o.epilogue == kSiluMul),
        blocks(o.cols / kBlock),
        panel_bytes(blocks * kBlockBytes[o.weight_kind]),
        out_rows(gated ? o.rows / 2 : o.rows),
        out_panels((out_rows + kLanes - 1) / kLanes) {}

  const uint8_t* panel(int64_t p) const { return op.weight + p * panel_bytes; }
  Floats bias(int64_t p) const { return op.bias ? load<Floats>(op.bias + p * kLanes) : Floats{}; }

  // What is to be put of a product and, if gated, its partner's.
  Floats finished(int64_t p, Floats product, Floats partner) const {
    product += bias(p);
    return gated ? activate(op.epilogue, product) * (partner + bias(p + out_panels)) : product;
  }

  void by_vectors(int64_t p, const Activations& a, int64_t tokens) const {
    Floats products[kMaxTogether], partners[kMaxTogether] = {};
    for (int64_t first = 0; first < tokens; first += kMaxTogether) {
      const int count = (int)std::min<int64_t>(kMaxTogether, tokens - first);
      dot_tokens(op.weight_kind, panel(p), blocks, a, first, count, products);
      if (gated) dot_tokens(op.weight_kind, panel(p + out_panels), blocks, a, first, count, partners);
      for (int t = 0; t < count; t++) results.put(first + t, p * kLanes, finished(p, products[t], partners[t]));
    }
  }

#if defined(HAS_TILES)
  // For tokens start .. end - 1, two panels at a time: p and its partner, or, in plain products, p and p + 1 if that exists.
  void by_tiles(int64_t p, const Activations& a, int64_t start, int64_t end, uint8_t* unpacked) const {
    if (op.weight_kind == kQ4) return by_tiles<kQ4>(p, a, start, end, unpacked);
    if (op.weight_kind == kQ8) return by_tiles<kQ8>(p, a, start, end, unpacked);
    by_tiles<kBf16>(p, a, start, end, unpacked);
  }

  template <int kKind>
  void by_tiles(int64_t p, const Activations& a, int64_t start, int64_t end, uint8_t* unpacked) const {
    const bool has_second = gated || p + 1 < out_panels, at_once = end - start <= 32;
    const uint8_t* w[2] = {panel(p), panel(!has_second ? p : gated ? p + out_panels : p + 1)};
    alignas(64) float products[2][32][kLanes];  // of the last 32 tokens
    // Copies, since results are stored where, for all that the compiler knows, these might lie.
    const Results to = results;
    const Floats biases[2] = {bias(p), has_second ? bias(gated ? p + out_panels : p + 1) : Floats{}};
    const bool is_gated = gated;
    int64_t token = start;
    const auto put_until = [&](int64_t after) {
      for (; token < after; token++) {
        const int64_t t = (token - start) % 32;
        const Floats one = load<Floats>(products[0][t]) + biases[0], two = load<Floats>(products[1][t]) + biases[1];
        to.put(token, p * kLanes, is_gated ? rough_silu(one) * two : one);
        if (!is_gated && has_second) to.put(token, (p + 1) * kLanes, two);
      }
    };
    const int64_t at_a_time = (32 + blocks - 1) / blocks;
    for (int64_t first = start; first < end; first += 32) {
      const bool both = end - first > 16;
      const uint16_t* x = a.wide + first * op.cols;
      float* out = products[0][0];
      if constexpr (kKind != kBf16) {
        if (first == start) {
          multiply_packed<kKind>(w[0], w[1], blocks, x, op.cols, both, out, unpacked, at_once ? 2 : blocks);
          continue;
        }
      }
      const uint8_t *one = kKind == kBf16 ? w[0] : unpacked, *two = kKind == kBf16 ? w[1] : unpacked + kBlockBytes[kBf16];
      multiply_tiles(one, two, kKind == kBf16 ? 1 : 2, blocks, x, op.cols, both, out,
                     [&](int64_t b) { put_until(std::min(first, first - 32 + (b + 1) * at_a_time)); });
    }
    put_until(end);
  }
#endif
};

// in [tokens, 2 cols], first the gates -> out [tokens, cols].
void gate(const Op& op, int64_t token) {
  const float* gates = op.in + token * 2 * op.cols;
  for (int64_t i = 0; i < op.cols; i += kLanes)
    store(op.out + token * op.cols + i, activate(op.epilogue, load<Floats>(gates + i)) * load<Floats>(gates + op.cols + i));
}

void add(const float* x, int64_t n, float* to) {
  for (int64_t i = 0; i < n; i += kLanes) store(to + i, load<Floats>(to + i) + load<Floats>(x + i));
}

}  // namespace
