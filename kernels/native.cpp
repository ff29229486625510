// A decoder's forward pass on a CPU: products with weights that stay quantized, norms, rotary embedding, attention over
// paged keys and values. Plain C functions at the end are called through ctypes (native_library.py).
//
// A step is a list of operations over fp32 buffers that all threads walk through, so that Python is left once a step.
// Threads claim the items of an operation from a counter: when another process takes a core away, the others do its share.
//
// The file is compiled for several instruction sets (native_library.py); vectors are GCC's generic ones, 16 lanes wide
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
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

// ---- Vectors ---------------------------------------------------------------------------------------------------------

constexpr int kLanes = 16;
constexpr int kBlock = 32;  // columns of a quantization block

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef int8_t Bytes __attribute__((vector_size(16)));

template <class V>
inline V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class V>
inline void store(void* p, V v) {
  std::memcpy(p, &v, sizeof v);
}
inline Floats spread(float x) { return Floats{} + x; }
inline Ints spread(int32_t x) { return Ints{} + x; }

inline float sum(Floats v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float total = 0;
  for (int i = 0; i < kLanes; i++) total += v[i];
  return total;
#endif
}

// GCC converts vectors of different sizes in halves: hence intrinsics where these matter.
inline int32_t sum(Ints v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  int32_t total = 0;
  for (int i = 0; i < kLanes; i++) total += v[i];
  return total;
#endif
}

inline Ints rounded(Floats v) { return __builtin_convertvector(v + (v < 0.0f ? spread(-0.5f) : spread(0.5f)), Ints); }

inline Floats from_bf16(Halves h) {
#if defined(__AVX512F__)
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16);
#else
  return (Floats)(__builtin_convertvector(h, Bits) << 16);
#endif
}

inline Bytes to_bytes(Ints v) {
#if defined(__AVX512F__)
  return (Bytes)_mm512_cvtepi32_epi8((__m512i)v);
#else
  return __builtin_convertvector(v, Bytes);
#endif
}

inline Halves to_bf16(Floats v) {  // rounds to nearest even; a NaN stays one
#if defined(__AVX512BF16__)
  return (Halves)_mm512_cvtneps_pbh((__m512)v);
#else
  Bits bits = (Bits)v;
  Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  Bits is_nan = (Bits)((bits & 0x7fffffff) > 0x7f800000);
  return __builtin_convertvector((is_nan & 0x7fc0) | (~is_nan & rounded), Halves);
#endif
}

inline Floats from_fp16(const uint8_t* p) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps((__m256i)load<Halves>(p));
#elif defined(__F16C__)
  Floats v;
  for (int half = 0; half < 2; half++) {
    __m256 part = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p + half));
    std::memcpy((float*)&v + 8 * half, &part, sizeof part);
  }
  return v;
#else
  Floats v;
  for (int i = 0; i < kLanes; i++) {  // shift the exponent into place; subnormals come out right by the product
    uint16_t h;
    std::memcpy(&h, p + 2 * i, 2);
    uint32_t bits = (uint32_t)(h & 0x7fff) << 13;
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    v[i] = (h & 0x8000 ? -1.0f : 1.0f) * magnitude * 0x1p112f;
  }
  return v;
#endif
}

// e^x to a few millionths: 2^n times a polynomial, n found by adding a number so large that fractions fall off. What is
// smaller than 2^-126 comes out as that, what is larger than 2^127 as that; a NaN stays one.
inline Floats exp(Floats x) {
  constexpr float kRounder = 12582912.0f;
  x *= 1.44269504f;
  x = x < -126.0f ? spread(-126.0f) : x;
  x = x > 127.0f ? spread(127.0f) : x;
  const Floats shifted = x + kRounder, f = x - (shifted - kRounder);
  Floats p = spread(1.33335581e-3f);
  for (float c : {9.61812911e-3f, 5.55041087e-2f, 2.40226507e-1f, 6.93147181e-1f, 1.0f}) p = p * f + c;
  return (Floats)((Ints)p + ((Ints)shifted << 23));
}

// acc + the products of four unsigned bytes in each lane of w with the four signed bytes of a, summed. Where the machine
// has no such instruction for the full range of w, it uses w - 128: see kBias.
#if defined(__AVX512VNNI__)
constexpr bool kBias = true;
inline Ints dot4(Ints acc, Ints w, int32_t a) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(a));
}
inline Ints dot4_wide(Ints acc, Ints w, int32_t a) { return dot4(acc, w, a); }
#elif defined(__AVX2__)
constexpr bool kBias = false;
template <class Product>
inline Ints by_halves(Ints acc, Ints w, int32_t a, Product product) {
  __m256i halves[2];
  std::memcpy(halves, &w, sizeof halves);
  for (auto& half : halves) half = _mm256_madd_epi16(product(half, _mm256_set1_epi32(a)), _mm256_set1_epi16(1));
  return acc + load<Ints>(halves);
}
inline Ints dot4(Ints acc, Ints w, int32_t a) {  // w <= 15: pairs fit 16 bits
  return by_halves(acc, w, a, [](__m256i x, __m256i y) { return _mm256_maddubs_epi16(x, y); });
}
inline Ints dot4_wide(Ints acc, Ints w, int32_t a) {  // |w - 128| * |a| <= 128 * 127: pairs fit 16 bits
  return by_halves(acc, w, a, [](__m256i x, __m256i y) {
    __m256i centred = _mm256_xor_si256(x, _mm256_set1_epi8(-128));
    return _mm256_maddubs_epi16(_mm256_abs_epi8(centred), _mm256_sign_epi8(y, centred));
  });
}
#else
constexpr bool kBias = true;
inline Ints dot4(Ints acc, Ints w, int32_t a) {
  for (int byte = 0; byte < 4; byte++) acc += ((w >> (8 * byte)) & 0xff) * spread((int32_t)(int8_t)(a >> (8 * byte)));
  return acc;
}
inline Ints dot4_wide(Ints acc, Ints w, int32_t a) { return dot4(acc, w, a); }
#endif

// acc + the products of the two bf16 values in each lane, summed.
#if defined(__AVX512BF16__)
constexpr bool kFastDot2 = true;
#else
constexpr bool kFastDot2 = false;
#endif
inline Floats dot2(Floats acc, Ints w, Ints a) {
#if defined(__AVX512BF16__)
  return (Floats)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)a);
#else
  const Bits high = (Bits)spread((int32_t)0xffff0000);
  acc += (Floats)((Bits)w << 16) * (Floats)((Bits)a << 16);
  return acc + (Floats)((Bits)w & high) * (Floats)((Bits)a & high);
#endif
}

// ---- Threads ---------------------------------------------------------------------------------------------------------

// A piece of a step that is shared out. It is over when all of its items are done, not when all threads have arrived: a
// thread whose core is busy with something else holds nobody up, unless in the middle of an item; it comes after the others
// and finds nothing left to claim.
struct alignas(64) Phase {
  std::atomic<int64_t> claimed{0};
  alignas(64) std::atomic<int64_t> done{0};

  void reset() {
    claimed.store(0, std::memory_order_relaxed);
    done.store(0, std::memory_order_relaxed);
  }

  template <class Work>
  void share(int64_t count, int64_t at_once, Work work) {
    for (;;) {
      const int64_t first = claimed.fetch_add(at_once, std::memory_order_relaxed);
      if (first >= count) break;
      const int64_t after = std::min(first + at_once, count);
      for (int64_t i = first; i < after; i++) work(i);
      done.fetch_add(after - first, std::memory_order_acq_rel);
    }
    // Waits spinning for some microseconds, the length of an uneven end; then it lets others have the core.
    for (int turns = 0; done.load(std::memory_order_acquire) < count; turns++) {
      if (turns > 4000) sched_yield();
#if defined(__x86_64__)
      else _mm_pause();
#endif
    }
  }
};

template <class T>
class Buffer {  // grows, never shrinks; aligned to cache lines; contents are lost when it grows
 public:
  T* at_least(size_t count) {
    if (count > size_) {
      data_.reset((T*)std::aligned_alloc(64, (count * sizeof(T) + 127) / 64 * 64));
      if (!data_) throw std::bad_alloc();
      size_ = count;
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T[], Free> data_;
  size_t size_ = 0;
};

// ---- The interface, mirrored by native_library.py ----------------------------------------------------------------------

enum WeightKind : int32_t { kQ4 = 0, kQ8 = 1, kBf16 = 2 };
enum OpKind : int32_t { kLinear = 0, kRopeStore = 1, kAttend = 2, kNorm = 3, kEmbed = 4, kGate = 5, kSum = 6 };
enum Epilogue : int32_t { kPut = 0, kAdd = 1, kSiluMul = 2, kGeluMul = 3 };

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
  void* k_cache;  // [pages, page_size, kv_heads, head_dim]
  void* v_cache;
  int32_t q_heads, kv_heads, head_dim, page_size;
  float score_scale;  // of q . k
  float softcap;      // scores become softcap * tanh(score / softcap); 0: they do not
  int64_t window;     // tokens that a query sees, itself included
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
};
}

namespace {

// ---- Activations -----------------------------------------------------------------------------------------------------

// The input of a product: as bf16 for the tile unit, else as integers with a scale for each block of 32. 8 bits of them
// would be five times as coarse as bf16, which turns the choice of a word now and then; few tokens wait for the weights
// anyway, so there are two times 8 bits.
constexpr float kRestSteps = 254.0f;

struct Activations {
  int8_t* q;      // [tokens, cols]
  int8_t* rest;   // [tokens, cols]: what rounding to q has left, in steps of 1 / kRestSteps
  float* scale;   // [tokens, blocks]
  float* total;   // [tokens, blocks]: scale * the sum of q + rest / kRestSteps
  int32_t* sums;  // [tokens, blocks, 2]: the sums of q and of rest
  uint16_t* wide;  // [tokens, cols] bf16
  int64_t blocks;
  bool tiled;  // the tile unit wants everything as [tokens / 16, blocks, 16] instead of [tokens, blocks]

  int64_t at(int64_t token, int64_t block) const {
    return tiled ? (token / kLanes * blocks + block) * kLanes + token % kLanes : token * blocks + block;
  }
};

struct Scratch {
  Buffer<int8_t> q, rest;
  Buffer<float> scale, total, row;
  Buffer<int32_t> sums;
  Buffer<uint16_t> wide;
  Buffer<int64_t> ends;

  Activations room(size_t tokens, size_t cols, bool tiled) {
    const size_t blocks = cols / kBlock;
    return {q.at_least(tokens * cols), rest.at_least(tokens * cols), scale.at_least(tokens * blocks), total.at_least(tokens * blocks),
            sums.at_least(2 * tokens * blocks), wide.at_least(tokens * cols), (int64_t)blocks, tiled};
  }
};

void rms_norm(const float* x, const float* weight, float eps, int64_t n, float* out) {
  Floats squares{};
  for (int64_t i = 0; i < n; i += kLanes) {
    Floats v = load<Floats>(x + i);
    squares += v * v;
  }
  const float factor = 1.0f / std::sqrt(sum(squares) / (float)n + eps);
  for (int64_t i = 0; i < n; i += kLanes) store(out + i, load<Floats>(x + i) * factor * load<Floats>(weight + i));
}

// The largest magnitude is found by comparing bit patterns, where a NaN is the largest of all: a broken row stays so.
void quantize(const float* x, int64_t token, const Activations& a) {
  for (int64_t b = 0; b < a.blocks; b++) {
    const int64_t at = a.at(token, b);
    Floats v[2] = {load<Floats>(x + b * kBlock), load<Floats>(x + b * kBlock + kLanes)};
    Ints magnitudes[2] = {(Ints)v[0] & 0x7fffffff, (Ints)v[1] & 0x7fffffff};
    Ints larger = magnitudes[0] > magnitudes[1] ? magnitudes[0] : magnitudes[1];
#if defined(__AVX512F__)
    const int32_t largest = _mm512_reduce_max_epi32((__m512i)larger);
#else
    int32_t largest = 0;
    for (int i = 0; i < kLanes; i++) largest = std::max(largest, larger[i]);
#endif
    float peak;
    std::memcpy(&peak, &largest, sizeof peak);
    const float inverse = peak > 0 ? 127.0f / peak : 0.0f;
    Ints sums{}, rest_sums{};
    for (int half = 0; half < 2; half++) {
      const Floats scaled = v[half] * inverse;
      const Ints q = rounded(scaled), rest = rounded((scaled - __builtin_convertvector(q, Floats)) * kRestSteps);
      sums += q;
      rest_sums += rest;
      store(a.q + at * kBlock + half * kLanes, to_bytes(q));
      store(a.rest + at * kBlock + half * kLanes, to_bytes(rest));
    }
    a.sums[2 * at] = sum(sums);
    a.sums[2 * at + 1] = sum(rest_sums);
    a.scale[at] = peak / 127.0f;
    a.total[at] = peak / 127.0f * ((float)a.sums[2 * at] + (float)a.sums[2 * at + 1] / kRestSteps);
  }
}

void widen(const float* x, int64_t token, const Activations& a) {
  for (int64_t i = 0; i < a.blocks * kBlock; i += kLanes)
    store(a.wide + a.at(token, i / kBlock) * kBlock + i % kBlock, to_bf16(load<Floats>(x + i)));
}

// ---- Products, few tokens: integer dot products with a panel -----------------------------------------------------------

constexpr int64_t kBlockBytes[] = {320, 544, 1024};
constexpr int kMaxTogether = 8;  // tokens that share the unpacked weights: their sums stay in registers

inline void prefetch_block(const uint8_t* w, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(w + 4 * bytes + line);
}

inline Floats joined(Ints dot, Ints rest) {
  return __builtin_convertvector(dot, Floats) + __builtin_convertvector(rest, Floats) * (1.0f / kRestSteps);
}

template <int kTokens>
void dot_q4(const uint8_t* w, int64_t blocks, const Activations& a, int64_t first, Floats* out) {
  Floats acc[kTokens] = {};
  for (int64_t b = 0; b < blocks; b++, w += kBlockBytes[kQ4]) {
    prefetch_block(w, kBlockBytes[kQ4]);
    Ints q[8];
    for (int j = 0; j < 4; j++) {
      const Ints pairs = load<Ints>(w + 64 * j);
      q[j] = pairs & 0x0f0f0f0f;
      q[j + 4] = (pairs >> 4) & 0x0f0f0f0f;
    }
    const Floats d = from_fp16(w + 256), m = from_fp16(w + 288);
    for (int t = 0; t < kTokens; t++) {
      const int64_t at = (first + t) * blocks + b;
      Ints dot{}, rest{};
      for (int j = 0; j < 8; j++) {
        dot = dot4(dot, q[j], load<int32_t>(a.q + at * kBlock + 4 * j));
        rest = dot4(rest, q[j], load<int32_t>(a.rest + at * kBlock + 4 * j));
      }
      acc[t] += joined(dot, rest) * (d * a.scale[at]) + m * a.total[at];
    }
  }
  for (int t = 0; t < kTokens; t++) out[t] = acc[t];
}

template <int kTokens>
void dot_q8(const uint8_t* w, int64_t blocks, const Activations& a, int64_t first, Floats* out) {
  Floats acc[kTokens] = {};
  for (int64_t b = 0; b < blocks; b++, w += kBlockBytes[kQ8]) {
    prefetch_block(w, kBlockBytes[kQ8]);
    Ints q[8];
    for (int j = 0; j < 8; j++) q[j] = load<Ints>(w + 64 * j);
    const Floats d = from_fp16(w + 512);
    for (int t = 0; t < kTokens; t++) {
      const int64_t at = (first + t) * blocks + b;
      Ints dot = spread(kBias ? -128 * a.sums[2 * at] : 0), rest = spread(kBias ? -128 * a.sums[2 * at + 1] : 0);
      for (int j = 0; j < 8; j++) {
        dot = dot4_wide(dot, q[j], load<int32_t>(a.q + at * kBlock + 4 * j));
        rest = dot4_wide(rest, q[j], load<int32_t>(a.rest + at * kBlock + 4 * j));
      }
      acc[t] += joined(dot, rest) * (d * a.scale[at]);
    }
  }
  for (int t = 0; t < kTokens; t++) out[t] = acc[t];
}

template <int kTokens>
void dot_bf16(const uint8_t* w, int64_t blocks, const Activations& a, int64_t first, Floats* out) {
  Floats acc[kTokens] = {};
  for (int64_t b = 0; b < blocks; b++, w += kBlockBytes[kBf16]) {
    prefetch_block(w, kBlockBytes[kBf16]);
    for (int j = 0; j < 16; j++) {
      const Ints pairs = load<Ints>(w + 64 * j);
      for (int t = 0; t < kTokens; t++) {
        const uint16_t* x = a.wide + ((first + t) * blocks + b) * kBlock;
        acc[t] = dot2(acc[t], pairs, spread(load<int32_t>(x + 2 * j)));
      }
    }
  }
  for (int t = 0; t < kTokens; t++) out[t] = acc[t];
}

template <int kTokens>
void dot_panel(int32_t kind, const uint8_t* w, int64_t blocks, const Activations& a, int64_t first, Floats* out) {
  if (kind == kQ4) return dot_q4<kTokens>(w, blocks, a, first, out);
  if (kind == kQ8) return dot_q8<kTokens>(w, blocks, a, first, out);
  dot_bf16<kTokens>(w, blocks, a, first, out);
}

// out[t]: the products of a panel with tokens first .. first + count - 1, at most kMaxTogether.
void dot_tokens(int32_t kind, const uint8_t* w, int64_t blocks, const Activations& a, int64_t first, int count, Floats* out) {
  if (count == 8) return dot_panel<8>(kind, w, blocks, a, first, out);
  if (count >= 4) {
    dot_panel<4>(kind, w, blocks, a, first, out);
    first += 4, out += 4, count -= 4;
  }
  if (count >= 2) {
    dot_panel<2>(kind, w, blocks, a, first, out);
    first += 2, out += 2, count -= 2;
  }
  if (count) dot_panel<1>(kind, w, blocks, a, first, out);
}

// ---- Products with the tile unit (AMX) ------------------------------------------------------------------------------------

// Whether tiles are faster for a number of tokens, as measured: from where unpacking weights to bf16 is worth it. Tiles of
// integers were tried too: scaling each block's sums takes them longer than all takes the integer vectors.
bool choose_tiles(bool has_tiles, int32_t kind, int64_t tokens) {
  return has_tiles && tokens >= (kind == kBf16 ? 5 : 14);
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

// ---- Linear layers -----------------------------------------------------------------------------------------------------

inline Floats activate(int32_t epilogue, Floats gate) {
  if (epilogue == kSiluMul) return gate / (1.0f + exp(-gate));
  // GELU by tanh, which is a sigmoid of twice its argument.
  const Floats inner = 1.5957691216f * (gate + 0.044715f * gate * gate * gate);
  return gate / (1.0f + exp(-inner));
}

// Panel p of the output and, in gated products, its partner that is multiplied with it.
struct Linear {
  const Op& op;
  const bool gated;
  const int64_t blocks, panel_bytes, out_rows, out_panels;

  explicit Linear(const Op& o)
      : op(o),
        gated(o.epilogue >= kSiluMul),
        blocks(o.cols / kBlock),
        panel_bytes(blocks * kBlockBytes[o.weight_kind]),
        out_rows(gated ? o.rows / 2 : o.rows),
        out_panels((out_rows + kLanes - 1) / kLanes) {}

  const uint8_t* panel(int64_t p) const { return op.weight + p * panel_bytes; }
  Floats bias(int64_t p) const { return op.bias ? load<Floats>(op.bias + p * kLanes) : Floats{}; }

  void put(int64_t token, int64_t p, Floats product, Floats partner) const {
    product += bias(p);
    if (gated) product = activate(op.epilogue, product) * (partner + bias(p + out_panels));
    float* place = op.out + token * out_rows + p * kLanes;
    const int64_t left = out_rows - p * kLanes;
    if (left >= kLanes) {
      store(place, op.epilogue == kAdd ? load<Floats>(place) + product : product);
      return;
    }
    for (int64_t i = 0; i < left; i++) place[i] = op.epilogue == kAdd ? place[i] + product[i] : product[i];
  }

  void by_vectors(int64_t p, const Activations& a, int64_t tokens) const {
    Floats products[kMaxTogether], partners[kMaxTogether] = {};
    for (int64_t first = 0; first < tokens; first += kMaxTogether) {
      const int count = (int)std::min<int64_t>(kMaxTogether, tokens - first);
      dot_tokens(op.weight_kind, panel(p), blocks, a, first, count, products);
      if (gated) dot_tokens(op.weight_kind, panel(p + out_panels), blocks, a, first, count, partners);
      for (int t = 0; t < count; t++) put(first + t, p, products[t], partners[t]);
    }
  }

#if defined(HAS_TILES)
  // Two panels at a time: p and its partner, or, in plain products, p and p + 1 if that exists.
  void by_tiles(int64_t p, const Activations& a, int64_t tokens, uint8_t* unpacked) const {
    const bool has_second = gated || p + 1 < out_panels;
    const int64_t bytes = blocks * kBlockBytes[kBf16];
    const int64_t indices[2] = {p, gated ? p + out_panels : p + 1};
    const uint8_t* wide[2];
    for (int i = 0; i < 2; i++) {
      wide[i] = i && !has_second ? wide[0] : panel(indices[i]);
      if (op.weight_kind == kBf16 || (i && !has_second)) continue;
      unpack(op.weight_kind, wide[i], blocks, unpacked + i * bytes);
      wide[i] = unpacked + i * bytes;
    }
    alignas(64) float products[2][32][kLanes];
    for (int64_t first = 0; first < tokens; first += 32) {
      const int64_t count = std::min<int64_t>(32, tokens - first);
      multiply_tiles(wide[0], wide[1], blocks, a.wide + first * op.cols, op.cols, count > 16, products[0][0]);
      for (int64_t t = 0; t < count; t++) {
        const Floats one = load<Floats>(products[0][t]), two = load<Floats>(products[1][t]);
        put(first + t, p, one, two);
        if (!gated && has_second) put(first + t, p + 1, two, Floats{});
      }
    }
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

// ---- Rotary embedding and the cache --------------------------------------------------------------------------------------

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

// ---- Attention -----------------------------------------------------------------------------------------------------------

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

// One query of the heads that share a key-value head: sees tokens first_seen .. kv_len - 1. q, out [group][dim]; scores:
// room for [group][tokens seen, rounded up to 16].
template <class Cache>
class Query {
 public:
  Query(const Op& op, const Step& step, int64_t sequence, int64_t kv_head, int64_t kv_len, float* scores)
      : op_(op), first_seen_(std::max<int64_t>(0, kv_len - op.window)), seen_(kv_len - first_seen_),
        start_(op, step, sequence, kv_head, first_seen_),
        padded_((seen_ + kLanes - 1) / kLanes * kLanes), group_(op.q_heads / op.kv_heads), dim_(op.head_dim),
        scores_(scores) {}

  void attend(const float* q, float* out) {
    Places keys = start_, values = start_;
    for (int64_t first = 0; first < seen_; first += kLanes) score(q, first, keys);
    for (int64_t g = 0; g < group_; g++) softmax(scores_ + g * padded_);
    std::memset(out, 0, group_ * dim_ * sizeof(float));
    for (int64_t first = 0; first < seen_; first += kLanes) add_values(first, values, out);
  }

 private:
  typedef typename Cache::Value Value;

  // Where 16 tokens' keys and values lie; those after the last repeat it, with weight 0.
  void locate(int64_t first, Places& places) {
    for (int64_t i = 0; i < kLanes; i++) places_[i] = first + i < seen_ ? places.next() : places_[i - 1];
  }

  void score(const float* q, int64_t first, Places& keys) {
    locate(first, keys);
    for (int64_t g = 0; g < group_; g++) {
      Floats acc[kLanes] = {};
      if (Cache::kIsBf16 && kFastDot2 && dim_ % (2 * kLanes) == 0) {
        for (int64_t i = 0; i < dim_; i += 2 * kLanes) {
          Halves part[2];
          for (int half = 0; half < 2; half++) part[half] = to_bf16(load<Floats>(q + g * dim_ + i + half * kLanes));
          for (int t = 0; t < kLanes; t++)
            acc[t] = dot2(acc[t], load<Ints>((const Value*)op_.k_cache + places_[t] + i), load<Ints>(part));
        }
      } else {
        for (int64_t i = 0; i < dim_; i += kLanes) {
          const Floats part = load<Floats>(q + g * dim_ + i);
          for (int t = 0; t < kLanes; t++) acc[t] += part * Cache::get((const Value*)op_.k_cache + places_[t] + i);
        }
      }
      Floats scores = sums_of(acc) * op_.score_scale;
      if (op_.softcap != 0) scores = op_.softcap * (1.0f - 2.0f / (exp(scores * (2.0f / op_.softcap)) + 1.0f));
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

  void add_values(int64_t first, Places& values, float* out) {
    locate(first, values);
    int64_t g = 0;
    for (; g + 4 <= group_; g += 4) add_heads<4>(g, first, out);
    for (; g + 3 <= group_; g += 3) add_heads<3>(g, first, out);
    for (; g < group_; g++) add_heads<1>(g, first, out);
  }

  template <int kHeads>
  void add_heads(int64_t g, int64_t first, float* out) const {
    for (int64_t i = 0; i < dim_; i += kLanes) {
      Floats acc[kHeads];
      for (int h = 0; h < kHeads; h++) acc[h] = load<Floats>(out + (g + h) * dim_ + i);
      for (int t = 0; t < kLanes; t++) {
        const Floats value = Cache::get((const Value*)op_.v_cache + places_[t] + i);
        for (int h = 0; h < kHeads; h++) acc[h] += value * scores_[(g + h) * padded_ + first + t];
      }
      for (int h = 0; h < kHeads; h++) store(out + (g + h) * dim_ + i, acc[h]);
    }
  }

  const Op& op_;
  const int64_t first_seen_, seen_;
  const Places start_;
  const int64_t padded_, group_, dim_;
  float* scores_;
  int64_t places_[kLanes];
};

// Queries of a chunk, block by block of keys (FlashAttention, arXiv 2205.14135). A vector holds one value of 16 rows, a row
// being a query and one of the heads that share a key-value head: so no sum or maximum runs across a vector.
template <class Cache>
class QueryBlock {
 public:
  static constexpr int64_t kVectors = 4, kRows = kVectors * kLanes, kKeys = 32, kTogether = 8;

  static int64_t queries(const Op& op) { return std::max<int64_t>(1, kRows / (op.q_heads / op.kv_heads)); }
  static size_t room(const Op& op) { return op.head_dim * (2 * kKeys + 2 * kRows); }

  QueryBlock(const Op& op, const Step& step, int64_t sequence, int64_t kv_head, int64_t first, int64_t count, float* room)
      : op_(op), step_(step), sequence_(sequence), kv_head_(kv_head), first_(first),
        group_(op.q_heads / op.kv_heads), rows_(count * group_), dim_(op.head_dim),
        position_(step.kv_lens[sequence] - (step.query_starts[sequence + 1] - first)), last_(position_ + count - 1),
        keys_(room), values_(keys_ + kKeys * dim_), queries_(values_ + kKeys * dim_), out_(queries_ + kRows * dim_) {}

  void attend() {
    const int64_t vectors = (rows_ + kLanes - 1) / kLanes;
    for (int64_t v = 0; v < vectors; v++) start(v);
    const int64_t first_key = std::max<int64_t>(0, position_ - op_.window + 1);
    Places places(op_, step_, sequence_, kv_head_, first_key);
    for (int64_t key = first_key; key <= last_; key += kKeys) {
      fetch(key, places);
      for (int64_t v = 0; v < vectors; v++) add_block(v, key);
    }
    for (int64_t row = 0; row < rows_; row++) {
      const float share = 1.0f / totals_[row / kLanes][row % kLanes];
      float* to = op_.out + place(row);
      for (int64_t d = 0; d < dim_; d++) to[d] = out_[(row / kLanes * dim_ + d) * kLanes + row % kLanes] * share;
    }
  }

 private:
  typedef typename Cache::Value Value;

  int64_t place(int64_t row) const {
    return ((first_ + row / group_) * op_.q_heads + kv_head_ * group_ + row % group_) * dim_;
  }

  // Queries with rows side by side, scaled; the rows that fill the last vector repeat the last one.
  void start(int64_t v) {
    for (int64_t lane = 0; lane < kLanes; lane++) {
      const int64_t row = std::min(v * kLanes + lane, rows_ - 1);
      const float* q = op_.in + place(row);
      for (int64_t d = 0; d < dim_; d++) queries_[(v * dim_ + d) * kLanes + lane] = q[d] * op_.score_scale;
      positions_[v][lane] = (int32_t)(position_ + row / group_);
    }
    std::memset(out_ + v * dim_ * kLanes, 0, dim_ * sizeof(Floats));
    tops_[v] = spread(-1e30f);  // finite: a window may leave a row none of the first keys
    totals_[v] = Floats{};
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
      for (Floats& score : scores) score = op_.softcap * (1.0f - 2.0f / (exp(score * (2.0f / op_.softcap)) + 1.0f));
    if (first + kKeys - 1 > position_ || first <= last_ - op_.window) mask(v, first, scores);
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

  void mask(int64_t v, int64_t first, Floats* scores) const {
    const int32_t window = (int32_t)std::min<int64_t>(op_.window, INT32_MAX / 2);
    for (int64_t k = 0; k < kKeys; k++) {
      const Ints distance = positions_[v] - (int32_t)(first + k);
      scores[k] = (distance >= 0) & (distance < window) ? scores[k] : spread(-INFINITY);
    }
  }

  // Scores become weights; returns their row's maximum so far.
  Floats weigh(int64_t v, Floats* scores) const {
    Floats top = tops_[v];
    for (int64_t k = 0; k < kKeys; k++) top = scores[k] > top ? scores[k] : top;
    for (int64_t k = 0; k < kKeys; k++) scores[k] = exp(scores[k] - top);
    return top;
  }

  const Op& op_;
  const Step& step_;
  const int64_t sequence_, kv_head_, first_, group_, rows_, dim_;
  const int64_t position_, last_;  // of the first and the last query
  float *keys_, *values_;          // [kKeys][dim]
  float *queries_, *out_;          // [kVectors][dim][16]
  Floats tops_[kVectors], totals_[kVectors];
  Ints positions_[kVectors];
};

// ---- A step --------------------------------------------------------------------------------------------------------------

// Walks one thread through the operations.
class Walker {
 public:
  Walker(const Step& step, int threads, Scratch& shared, Scratch& own, bool has_tiles)
      : step_(step), threads_(threads), shared_(shared), own_(own), has_tiles_(has_tiles) {}

  // phases: two, of which most operations use the second only.
  void run(const Op& op, Phase* phases) {
    Phase& phase = phases[1];
    switch (op.kind) {
      case kLinear: return linear(op, phases[0], phase);
      case kRopeStore:
        phase.share(step_.tokens, 8, [&](int64_t t) { rope_store(op, step_, t, own_.row.at_least(op.head_dim)); });
        return;
      case kAttend: return attend_all(op, phase);
      case kNorm:
        phase.share(step_.tokens, 8, [&](int64_t t) {
          rms_norm(op.in + t * op.cols, op.norm, op.eps, op.cols, op.out + t * op.cols);
        });
        return;
      case kEmbed:
        phase.share(step_.tokens, 8, [&](int64_t t) { embed(op, t); });
        return;
      case kGate:
        phase.share(step_.tokens, 8, [&](int64_t t) { gate(op, t); });
        return;
      case kSum:
        phase.share(step_.tokens, 8, [&](int64_t t) { add(op.in + t * op.cols, op.cols, op.out + t * op.cols); });
        return;
    }
  }

 private:
  void prepare(const Op& op, int64_t token, bool as_bf16, const Activations& a) {
    const float* x = op.in + token * op.cols;
    if (op.norm) {
      float* normed = own_.row.at_least(op.cols);
      rms_norm(x, op.norm, op.eps, op.cols, normed);
      x = normed;
    }
    as_bf16 ? widen(x, token, a) : quantize(x, token, a);
  }

  void linear(const Op& op, Phase& preparing, Phase& phase);
  void attend_all(const Op& op, Phase& phase);
  template <class Cache>
  void attend_cached(const Op& op, Phase& phase);
  void embed(const Op& op, int64_t token);

  const Step& step_;
  const int threads_;
  Scratch& shared_;
  Scratch& own_;
  const bool has_tiles_;
};

// Tiles are read whole, bf16 ones two at a time: there is room for as many rows as that takes.
int64_t padded_tokens(int64_t tokens) { return (tokens + 31) / 32 * 32; }

void Walker::linear(const Op& op, Phase& preparing, Phase& phase) {
  const Linear layer(op);
  const int64_t tokens = step_.tokens;
  const bool by_tiles = choose_tiles(has_tiles_, op.weight_kind, tokens);
  const bool as_bf16 = by_tiles || op.weight_kind == kBf16;
  Activations a;
  if (tokens == 1) {  // each thread for itself: cheaper than to wait for another
    a = own_.room(1, op.cols, false);
    prepare(op, 0, as_bf16, a);
  } else {
    a = shared_.room(padded_tokens(tokens), op.cols, by_tiles);
    preparing.share(tokens, 1 + tokens / 64, [&](int64_t t) { prepare(op, t, as_bf16, a); });
  }
#if defined(HAS_TILES)
  if (by_tiles) {
    uint8_t* unpacked = (uint8_t*)own_.q.at_least(2 * layer.blocks * kBlockBytes[kBf16]);
    const int64_t step = layer.gated ? 1 : 2;
    phase.share((layer.out_panels + step - 1) / step, 1,
          [&](int64_t i) { layer.by_tiles(i * step, a, tokens, unpacked); });
    return;
  }
#endif
  const int64_t at_once = std::max<int64_t>(1, layer.out_panels / (8 * threads_));
  phase.share(layer.out_panels, at_once, [&](int64_t p) { layer.by_vectors(p, a, tokens); });
}

void Walker::attend_all(const Op& op, Phase& phase) {
  if (op.cache_bf16)
    attend_cached<Bf16Cache>(op, phase);
  else
    attend_cached<Fp32Cache>(op, phase);
}

// A piece of work is a key-value head of a decode, or of a block of queries.
template <class Cache>
void Walker::attend_cached(const Op& op, Phase& phase) {
  const int64_t group = op.q_heads / op.kv_heads, per_block = QueryBlock<Cache>::queries(op);
  int64_t* ends = own_.ends.at_least(step_.sequences);
  for (int64_t s = 0; s < step_.sequences; s++) {
    const int64_t queries = step_.query_starts[s + 1] - step_.query_starts[s];
    ends[s] = (s ? ends[s - 1] : 0) + (queries + per_block - 1) / per_block * op.kv_heads;
  }
  phase.share(ends[step_.sequences - 1], 1, [&](int64_t task) {
    const int64_t s = std::upper_bound(ends, ends + step_.sequences, task) - ends;
    const int64_t number = task - (s ? ends[s - 1] : 0), head = number % op.kv_heads;
    const int64_t first = step_.query_starts[s] + number / op.kv_heads * per_block;
    const int64_t count = std::min(per_block, step_.query_starts[s + 1] - first), kv_len = step_.kv_lens[s];
    if (step_.query_starts[s + 1] - step_.query_starts[s] > 1) {
      float* room = own_.row.at_least(QueryBlock<Cache>::room(op));
      QueryBlock<Cache>(op, step_, s, head, first, count, room).attend();
      return;
    }
    const int64_t at = (first * op.kv_heads + head) * group * op.head_dim;
    float* scores = own_.row.at_least(group * (kv_len + kLanes));
    Query<Cache>(op, step_, s, head, kv_len, scores).attend(op.in + at, op.out + at);
  });
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
  bool tiles = false;
  Scratch shared;
  std::vector<Scratch> own;
  std::vector<Phase> phases;
};

}  // namespace

extern "C" {

void* engine_new(int threads) {
  auto engine = new Engine;
  engine->threads = threads;
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
    if (ops[i].kind != kLinear) continue;
    engine.shared.room(padded_tokens(step->tokens), ops[i].cols, true);
  }
#pragma omp parallel num_threads(engine.threads)
  {
    const int thread = omp_get_thread_num();
#if defined(HAS_TILES)
    if (engine.tiles) configure_tiles();
#endif
    Walker walker(*step, engine.threads, engine.shared, engine.own[thread], engine.tiles);
    for (int64_t i = 0; i < count; i++) walker.run(ops[i], &engine.phases[2 * i]);
#if defined(HAS_TILES)
    if (engine.tiles) _tile_release();
#endif
  }
}
}
