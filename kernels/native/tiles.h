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
  constexpr int64_t kFewest[] = {6, 10, 5};
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

// Two vectors of 16 columns' values as one of bf16 pairs; finite values, halves rounded away from zero.
inline Ints pairs(Floats even, Floats odd) {
  const Ints low = (Ints)(((Bits)even + 0x8000) >> 16), high = (Ints)((Bits)odd + 0x8000);
  return (Ints)_mm512_mask_mov_epi16((__m512i)low, 0xaaaaaaaa, (__m512i)high);
}

inline void unpack_q4(const uint8_t* w, uint8_t* out) {
  const Floats d = from_fp16(w + 256), m = from_fp16(w + 288);
  const Floats m8 = m - d * raise(8), m12 = m - d * raise(12), m16 = m - d * raise(16);
  for (int j = 0; j < 4; j++, w += 64, out += 128) {
    const Ints q = load<Ints>(w), left = q << 12, right = (Ints)((Bits)q >> 12);
    store(out, pairs(raised<4, 12>(left) * d + m12, raised<4, 8>(q) * d + m8));
    store(out + 64, pairs(raised<4, 16>(q) * d + m16, raised<4, 12>(right) * d + m12));
    store(out + 512, pairs(raised<4, 16>(left) * d + m16, raised<4, 12>(q) * d + m12));
    store(out + 576, pairs(raised<4, 8>(right) * d + m8, raised<4, 16>(right) * d + m16));
  }
}

inline void unpack_q8(const uint8_t* w, uint8_t* out) {
  const Floats d = from_fp16(w + 512), m = d * (-128.0f - raise(8));
  for (int j = 0; j < 8; j++, w += 64, out += 128) {
    const Ints q = load<Ints>(w);
    store(out, pairs(raised<8, 8>(q << 8) * d + m, raised<8, 8>(q) * d + m));
    store(out + 64, pairs(raised<8, 8>((Ints)((Bits)q >> 8)) * d + m, raised<8, 8>((Ints)((Bits)q >> 16)) * d + m));
  }
}

inline void unpack_block(int32_t kind, const uint8_t* w, uint8_t* out) {
  prefetch_block(w, kBlockBytes[kind]);
  kind == kQ4 ? unpack_q4(w, out) : unpack_q8(w, out);
}

// A panel in the layout of kBf16.
void unpack(int32_t kind, const uint8_t* w, int64_t blocks, uint8_t* out) {
  for (int64_t b = 0; b < blocks; b++) unpack_block(kind, w + b * kBlockBytes[kind], out + b * kBlockBytes[kBf16]);
}

// Products of two panels with 32 (or, if not both, 16) tokens, in tiles 0 to 3: [2 panels][2] of 16 tokens.
struct TileSums {
  const uint16_t *x0, *x1;
  const bool both;

  TileSums(const uint16_t* x, int64_t cols, bool has_both) : x0(x), x1(x + 16 * cols), both(has_both) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }

  void add_block(int64_t b, const uint8_t* w0, const uint8_t* w1) {
    constexpr int64_t kTile = kLanes * kBlock;
    _tile_stream_loadd(4, x0 + b * kTile, 64);  // not to be kept in the first cache, where the weights are
    _tile_loadd(6, w0, 64);
    _tile_loadd(7, w1, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (!both) return;
    _tile_stream_loadd(5, x1 + b * kTile, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }

  void take(float* out) {  // [2 panels][32 tokens][16]
    _tile_stored(0, out, 64);
    _tile_stored(1, out + 512, 64);
    _tile_stored(2, out + 256, 64);
    _tile_stored(3, out + 768, 64);
  }
};

// With unpacked panels.
void multiply_tiles(const uint8_t* w0, const uint8_t* w1, int64_t blocks, const uint16_t* x, int64_t cols, bool both,
                    float* out) {
  TileSums sums(x, cols, both);
  for (int64_t b = 0; b < blocks; b++) sums.add_block(b, w0 + b * kBlockBytes[kBf16], w1 + b * kBlockBytes[kBf16]);
  sums.take(out);
}

// With quantized panels, when these are all the tokens: a block is unpacked to the first cache while the tile unit has the
// one before.
void multiply_packed(int32_t kind, const uint8_t* w0, const uint8_t* w1, int64_t blocks, const uint16_t* x, int64_t cols,
                     bool both, float* out) {
  constexpr int64_t kBytes = kBlockBytes[kBf16];
  alignas(64) uint8_t unpacked[2][2][kBytes];
  TileSums sums(x, cols, both);
  for (int64_t b = 0; b <= blocks; b++) {
    if (b < blocks) {
      unpack_block(kind, w0 + b * kBlockBytes[kind], unpacked[b % 2][0]);
      unpack_block(kind, w1 + b * kBlockBytes[kind], unpacked[b % 2][1]);
    }
    if (b > 0) sums.add_block(b - 1, unpacked[(b - 1) % 2][0], unpacked[(b - 1) % 2][1]);
  }
  sums.take(out);
}
#endif

}  // namespace
