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
  return has_tiles && tokens >= (kind == kBf16 ? 5 : 14);
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
  struct alignas(64) {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_per_row[16];
    uint8_t rows[16];
  } config = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
  _tile_loadconfig(&config);
}

// Two vectors of 16 columns' values as one of bf16 pairs.
inline Ints interleave(Floats even, Floats odd) {
  const Ints order = (Ints)_mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                            5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return (Ints)_mm512_permutexvar_epi16((__m512i)order, (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even));
}

// A panel in the layout of kBf16.
void unpack(int32_t kind, const uint8_t* w, int64_t blocks, uint8_t* out) {
  for (int64_t b = 0; b < blocks; b++, w += kBlockBytes[kind], out += kBlockBytes[kBf16]) {
    prefetch_block(w, kBlockBytes[kind]);
    const int64_t scales = kind == kQ4 ? 256 : 512;
    const Floats d = from_fp16(w + scales), m = kind == kQ4 ? from_fp16(w + scales + 32) : d * -128.0f;
    for (int j = 0; j < 8; j++) {
      Ints q = load<Ints>(w + 64 * (kind == kQ4 ? j & 3 : j));
      if (kind == kQ4) q = (j < 4 ? q : q >> 4) & 0x0f0f0f0f;
      Floats values[4];
      for (int byte = 0; byte < 4; byte++)
        values[byte] = __builtin_convertvector((q >> (8 * byte)) & 0xff, Floats) * d + m;
      store(out + 128 * j, interleave(values[0], values[1]));
      store(out + 128 * j + 64, interleave(values[2], values[3]));
    }
  }
}

// Products of two unpacked panels with 32 (or, if not both, 16) tokens -> out [2 panels][32 tokens][16].
void multiply_tiles(const uint8_t* w0, const uint8_t* w1, int64_t blocks, const uint16_t* x, int64_t cols, bool both,
                    float* out) {
  constexpr int64_t kTile = kLanes * kBlock;
  const uint16_t* x1 = x + 16 * cols;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t b = 0; b < blocks; b++) {
    _tile_loadd(4, x + b * kTile, 64);
    _tile_loadd(6, w0 + b * 1024, 64);
    _tile_loadd(7, w1 + b * 1024, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (!both) continue;
    _tile_loadd(5, x1 + b * kTile, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, out, 64);
  _tile_stored(1, out + 512, 64);
  _tile_stored(2, out + 256, 64);
  _tile_stored(3, out + 768, 64);
}
#endif

}  // namespace
