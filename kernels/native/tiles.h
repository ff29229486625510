// Products for many tokens with the tile unit (AMX), where there is one.

#pragma once

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <cstdint>

#include "dots.h"

namespace {

// Whether tiles are faster for a number of tokens, as measured: from where unpacking weights to bf16 is worth it. Tiles of
// integers were tried too: scaling each block's sums takes them longer than all takes the integer vectors.
bool choose_tiles(bool has_tiles, int32_t kind, int64_t tokens) {
  constexpr int64_t kFewest[] = {5, 9, 5};
  return has_tiles && tokens >= kFewest[kind];
}

// Tokens whose activations stay in a core's second cache while panels pass by; each span unpacks the panels anew.
int64_t tokens_in_cache(int64_t cols) {
  constexpr int64_t kBytes = 1 << 20, kFewest = 256;
  return std::max(kFewest, kBytes / (2 * cols) / 32 * 32);
}

#if defined(__AMX_BF16__)
#define HAS_TILES

bool tiles_usable() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl: the kernel must be asked once a process
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

void configure_tiles() {  // all eight: 16 rows of 64 bytes
  // Static: GCC 12 takes the instruction to read 8 bytes of it, and leaves out stores of the others.
  static constexpr struct alignas(64) {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_per_row[16];
    uint8_t rows[16];
  } config = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
  _tile_loadconfig(&config);
}

// Quantized values become floats without a conversion: kBits at bit kAt of a lane are ored into the mantissa of
// 2 ** (23 - kAt), which gives that power plus the value. Scale and what must be subtracted are one multiply-add then.
template <int kBits, int kAt>
inline Floats raised(Ints lanes) {
  static_assert(kAt >= 8 && kAt + kBits <= 23, "lower bits lose precision, higher ones are the exponent");
  const Ints mask = spread(((1 << kBits) - 1) << kAt), power = spread((127 + 23 - kAt) << 23);
  return (Floats)((lanes & mask) | power);
}
constexpr float raise(int at) { return (float)(1 << (23 - at)); }

// Two vectors of 16 columns' values as one of bf16 pairs, cut off towards zero. What was multiplied by kUncut before is no
// smaller in the mean, and what fits bf16 stays as it is; to round would be a quarter of unpacking.
constexpr float kUncut = 1.00282f;  // 1 + 2 ** -8, the mean of what is cut off, times 0.72, that of 1 / mantissa
inline Ints cut_pairs(Floats even, Floats odd) {
  return (Ints)_mm512_mask_mov_epi16((__m512i)((Bits)even >> 16), 0xaaaaaaaa, (__m512i)odd);
}

// A block of a panel on its way to the layout of kBf16, a half of it at a time. ahead: the block that is fetched meanwhile.
template <int kKind>
class Unpacker;

template <>
class Unpacker<kQ4> {
 public:
  Unpacker(const uint8_t* block, int64_t ahead) : block_(block), d_(from_fp16(block + 256) * kUncut) {
    prefetch_block(block, kBlockBytes[kQ4], ahead);
    const Floats m = from_fp16(block + 288) * kUncut;
    m8_ = m - d_ * raise(8), m12_ = m - d_ * raise(12), m16_ = m - d_ * raise(16);
  }

  void half(int which, uint8_t* out) const {
    out += 256 * which;
    for (int j = 2 * which; j < 2 * which + 2; j++, out += 128) {
      const Ints q = load<Ints>(block_ + 64 * j), left = q << 12, right = (Ints)((Bits)q >> 12);
      store(out, cut_pairs(raised<4, 12>(left) * d_ + m12_, raised<4, 8>(q) * d_ + m8_));
      store(out + 64, cut_pairs(raised<4, 16>(q) * d_ + m16_, raised<4, 12>(right) * d_ + m12_));
      store(out + 512, cut_pairs(raised<4, 16>(left) * d_ + m16_, raised<4, 12>(q) * d_ + m12_));
      store(out + 576, cut_pairs(raised<4, 8>(right) * d_ + m8_, raised<4, 16>(right) * d_ + m16_));
    }
  }

 private:
  const uint8_t* block_;
  const Floats d_;
  Floats m8_, m12_, m16_;
};

template <>
class Unpacker<kQ8> {
 public:
  Unpacker(const uint8_t* block, int64_t ahead)
      : block_(block), d_(from_fp16(block + 512) * kUncut), m_(d_ * (-128.0f - raise(8))) {
    prefetch_block(block, kBlockBytes[kQ8], ahead);
  }

  void half(int which, uint8_t* out) const {
    out += 512 * which;
    for (int j = 4 * which; j < 4 * which + 4; j++, out += 128) {
      const Ints q = load<Ints>(block_ + 64 * j);
      store(out, cut_pairs(raised<8, 8>(q << 8) * d_ + m_, raised<8, 8>(q) * d_ + m_));
      const Ints once = (Ints)((Bits)q >> 8), twice = (Ints)((Bits)q >> 16);
      store(out + 64, cut_pairs(raised<8, 8>(once) * d_ + m_, raised<8, 8>(twice) * d_ + m_));
    }
  }

 private:
  const uint8_t* block_;
  const Floats d_, m_;
};

template <int kKind>
void unpack(const uint8_t* block, uint8_t* out) {
  const Unpacker<kKind> unpacker(block, kBlocksAhead);
  unpacker.half(0, out);
  unpacker.half(1, out);
}

constexpr float kLog2E = 1.44269504f;

// 2^x times a constant to 10^-4, for what will be in bf16. 0 gives the constant itself, minus infinity 0.
inline Floats rough_exp2(Floats x, float factor = 1.0f) {
  const Floats f = (Floats)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  Floats p = spread(0.0770670f * factor);
  for (float c : {0.2276450f, 0.6951168f, 1.0f}) p = p * f + c * factor;
  return (Floats)_mm512_scalef_ps((__m512)p, (__m512)x);
}

// x / (1 + e^-x) as precisely.
inline Floats rough_silu(Floats x) {
  return x * (Floats)_mm512_rcp14_ps((__m512)(1.0f + rough_exp2(x * -kLog2E)));
}

// Products of two panels with 32 (or, if not both, 16) tokens, in tiles 0 to 3: [2 panels][2] of 16 tokens.
class TileSums {
 public:
  TileSums(const uint16_t* x, int64_t cols, bool both) : x0_(x), x1_(x + 16 * cols), both_(both) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }

  // A block's products, of tokens and panel by number, in this order: each loads what those before have not. Tokens are not
  // to be kept in the first cache, where the weights are.
  void add_00(int64_t b, const uint8_t* w0) const {
    _tile_stream_loadd(4, x0_ + b * kTile, 64);
    _tile_loadd(6, w0, 64);
    _tile_dpbf16ps(0, 4, 6);
  }
  void add_10(int64_t b) const {
    if (!both_) return;
    _tile_stream_loadd(5, x1_ + b * kTile, 64);
    _tile_dpbf16ps(2, 5, 6);
  }
  void add_01(const uint8_t* w1) const {
    _tile_loadd(7, w1, 64);
    _tile_dpbf16ps(1, 4, 7);
  }
  void add_11() const {
    if (both_) _tile_dpbf16ps(3, 5, 7);
  }

  void add_block(int64_t b, const uint8_t* w0, const uint8_t* w1) const {
    add_00(b, w0);
    add_10(b);
    add_01(w1);
    add_11();
  }

  void take(float* out) const {  // [2 panels][32 tokens][16]
    _tile_stored(0, out, 64);
    _tile_stored(1, out + 512, 64);
    _tile_stored(2, out + 256, 64);
    _tile_stored(3, out + 768, 64);
  }

 private:
  static constexpr int64_t kTile = kLanes * kBlock;
  const uint16_t *x0_, *x1_;
  const bool both_;
};

// With unpacked panels, whose blocks are so many blocks apart. meanwhile(b): other work in vectors, which the processor does
// while the tile unit has block b.
template <class Work>
void multiply_tiles(const uint8_t* w0, const uint8_t* w1, int64_t apart, int64_t blocks, const uint16_t* x, int64_t cols,
                    bool both, float* out, Work meanwhile) {
  const TileSums sums(x, cols, both);
  for (int64_t b = 0; b < blocks; b++, w0 += apart * kBlockBytes[kBf16], w1 += apart * kBlockBytes[kBf16]) {
    sums.add_block(b, w0, w1);
    meanwhile(b);
  }
  sums.take(out);
}

// With quantized panels, which are left unpacked as [blocks][2 panels], the last `kept` blocks in turn. While the tile unit
// has a block, the next is unpacked, in pieces between the products, since no more instructions than those of a piece are
// looked ahead.
template <int kKind>
void multiply_packed(const uint8_t* w0, const uint8_t* w1, int64_t blocks, const uint16_t* x, int64_t cols, bool both,
                     float* out, uint8_t* unpacked, int64_t kept) {
  constexpr int64_t kBytes = kBlockBytes[kBf16];
  const int64_t ahead = kept < blocks ? kBlocksAhead : 4;  // what is kept needs the first cache for itself
  const TileSums sums(x, cols, both);
  unpack<kKind>(w0, unpacked);
  unpack<kKind>(w1, unpacked + kBytes);
  uint8_t* ready = unpacked;
  for (int64_t b = 1; b < blocks; b++) {
    uint8_t* next = unpacked + b % kept * 2 * kBytes;
    const Unpacker<kKind> first(w0 + b * kBlockBytes[kKind], ahead);
    sums.add_00(b - 1, ready);
    first.half(0, next);
    sums.add_10(b - 1);
    first.half(1, next);
    const Unpacker<kKind> second(w1 + b * kBlockBytes[kKind], ahead);
    sums.add_01(ready + kBytes);
    second.half(0, next + kBytes);
    sums.add_11();
    second.half(1, next + kBytes);
    ready = next;
  }
  sums.add_block(blocks - 1, ready, ready + kBytes);
  sums.take(out);
}
#endif

}  // namespace
