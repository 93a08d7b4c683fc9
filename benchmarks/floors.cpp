// What CPU kernels are judged against, compiled by harness.py for the instruction set that they may use. Bandwidths: a copy with
// non-temporal stores (no read of the lines it overwrites), a read, and such stores alone. Rates of multiplication: the CPU's widest
// multiply-add of each type on registers. Threads are fresh per call (about 30 us, so measure tens of megabytes, or milliseconds):
// an OpenMP pool here would spin beside torch's.
#include <immintrin.h>
#if defined(__AMX_TILE__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstdint>
#include <thread>
#include <vector>

namespace {

#if defined(__AVX512F__)
using Line = __m512i;
Line load(const Line* p) { return _mm512_load_si512(p); }
void stream(Line* p, Line v) { _mm512_stream_si512(p, v); }
Line add(Line a, Line b) { return _mm512_add_epi64(a, b); }
#elif defined(__AVX2__)
using Line = __m256i;
Line load(const Line* p) { return _mm256_load_si256(p); }
void stream(Line* p, Line v) { _mm256_stream_si256(p, v); }
Line add(Line a, Line b) { return _mm256_add_epi64(a, b); }
#else
using Line = __m128i;
Line load(const Line* p) { return _mm_load_si128(p); }
void stream(Line* p, Line v) { _mm_stream_si128(p, v); }
Line add(Line a, Line b) { return _mm_add_epi64(a, b); }
#endif

// body(thread, first line, last line) on `threads` threads; lines come in groups of 4 (the bytes must be a multiple of
// 256 * threads).
template <class Body>
void split(int64_t bytes, int threads, const Body& body) {
  const int64_t lines = bytes / int64_t(sizeof(Line)) / threads / 4 * 4;
  std::vector<std::thread> pool;
  for (int t = 1; t < threads; ++t) pool.emplace_back([&, t] { body(t, t * lines, (t + 1) * lines); });
  body(0, 0, lines);
  for (std::thread& thread : pool) thread.join();
}

// ---- products: sum += a * b, of as many elements as an instruction takes. The instructions are written out, so that no compiler adds
// moves of sums to them. -------------------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
using Sum = __m512;
#define MULTIPLY_ADD(instruction, sum, a, b) asm(instruction " %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b))
constexpr int kRows = 12, kColumns = 2;  // of sums: more than latency times instructions in a cycle
#else
using Sum = __m256;
#define MULTIPLY_ADD(instruction, sum, a, b) asm(instruction " %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b))
constexpr int kRows = 5, kColumns = 2;  // 16 registers hold no more beside their factors
#endif

struct Fp32Products {
  static constexpr int kProducts = sizeof(Sum) / 4;
  static void add(Sum& sum, Sum a, Sum b) { MULTIPLY_ADD("vfmadd231ps", sum, a, b); }
};

#if defined(__AVX512BF16__)
struct Bf16Products {
  static constexpr int kProducts = sizeof(Sum) / 2;
  static void add(Sum& sum, Sum a, Sum b) { MULTIPLY_ADD("vdpbf16ps", sum, a, b); }
};
#else
using Bf16Products = Fp32Products;  // of widened elements
#endif

struct Int8Products {
#if defined(__AVX512VNNI__)
  static constexpr int kProducts = sizeof(Sum);
  static void add(Sum& sum, Sum a, Sum b) { MULTIPLY_ADD("vpdpbusd", sum, a, b); }
#elif defined(__AVXVNNI__)
  static constexpr int kProducts = sizeof(Sum);
  static void add(Sum& sum, Sum a, Sum b) { MULTIPLY_ADD("%{vex%} vpdpbusd", sum, a, b); }
#else
  static constexpr int kProducts = sizeof(Sum) / 2;  // widened: pairs of bytes that are not would saturate
  static void add(Sum& sum, Sum a, Sum b) {
    Sum pairs;  // volatile, or those of the same a and b would be computed once
    asm volatile("vpmaddwd %2, %1, %0" : "=x"(pairs) : "x"(a), "x"(b));
    asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(pairs));
  }
#endif
};

// `count` products at least, as a number that depends on all of them.
template <class Products>
float multiply(int64_t count) {
  Sum sums[kRows][kColumns], a[2], b[kColumns];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int c = 0; c < kColumns; ++c) sums[r][c] = Sum{};
  for (int i = 0; i < 2; ++i) a[i] = Sum{} + (i ? -0.731f : 0.732f);
  for (int i = 0; i < kColumns; ++i) b[i] = Sum{} + (i ? 1.377f : 1.375f);
  for (; count > 0; count -= kRows * kColumns * Products::kProducts) {
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
      for (int c = 0; c < kColumns; ++c) Products::add(sums[r][c], a[r % 2], b[c]);
  }
  Sum all{};
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r)  // a loop at run time would keep the sums in memory
#pragma GCC unroll 2
    for (int c = 0; c < kColumns; ++c) all += sums[r][c];
  return all[0];
}

#if defined(__AMX_TILE__)
// 4 tiles of sums, 16 x 16 each, of two tiles on either side. `kind`: 0 bf16, 1 int8.
template <int kind>
float multiply_tiles(int64_t count) {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) return 0.0f;
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } shape;
  for (int t = 0; t < 8; ++t) shape.row_bytes[t] = 64, shape.rows[t] = 16;
  alignas(64) uint16_t data[512];
  for (int i = 0; i < 512; ++i) data[i] = uint16_t(0x3F3B + i % 7 + (i % 2 << 15));
  _tile_loadconfig(&shape);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, data, 64);
  _tile_loadd(5, data, 64);
  _tile_loadd(6, data, 64);
  _tile_loadd(7, data, 64);
  for (; count > 0; count -= 4 * 16 * 16 * (kind ? 64 : 32)) {
    if constexpr (kind == 0) {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    } else {
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 4, 7);
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
    }
  }
  alignas(64) float sums[256];
  _tile_stored(0, sums, 64);
  _tile_release();
  return sums[0];
}
#endif

template <class Work>
void on_threads(int64_t count, int threads, const Work& work) {
  std::vector<std::thread> pool;
  std::vector<float> results(size_t(threads) * 16);
  for (int t = 1; t < threads; ++t) pool.emplace_back([&, t] { results[size_t(t) * 16] = work(count / threads); });
  results[0] = work(count / threads);
  for (std::thread& thread : pool) thread.join();
  volatile float kept = results[0];
  (void)kept;
}

}  // namespace

extern "C" void floor_fp32_products(int64_t count, int threads) { on_threads(count, threads, multiply<Fp32Products>); }

extern "C" void floor_bf16_products(int64_t count, int threads) {
#if defined(__AMX_BF16__)
  on_threads(count, threads, multiply_tiles<0>);
#else
  on_threads(count, threads, multiply<Bf16Products>);
#endif
}

extern "C" void floor_int8_products(int64_t count, int threads) {
#if defined(__AMX_INT8__)
  on_threads(count, threads, multiply_tiles<1>);
#else
  on_threads(count, threads, multiply<Int8Products>);
#endif
}

extern "C" void floor_copy(const void* source, void* target, int64_t bytes, int threads) {
  split(bytes, threads, [&](int, int64_t begin, int64_t end) {
    const Line* from = static_cast<const Line*>(source);
    Line* to = static_cast<Line*>(target);
    for (int64_t i = begin; i < end; i += 4) {
      const Line a = load(from + i), b = load(from + i + 1), c = load(from + i + 2), d = load(from + i + 3);
      stream(to + i, a);
      stream(to + i + 1, b);
      stream(to + i + 2, c);
      stream(to + i + 3, d);
    }
    _mm_sfence();
  });
}

extern "C" void floor_write(void* target, int64_t bytes, int threads) {
  split(bytes, threads, [&](int, int64_t begin, int64_t end) {
    Line* to = static_cast<Line*>(target);
    Line value, step;  // no zeros: a Zen 4 writes lines of them faster than any output
    for (size_t i = 0; i < sizeof(Line) / 8; ++i) {
      value[i] = int64_t(0x9E3779B97F4A7C15u * (i + 1));
      step[i] = int64_t(0xD1B54A32D192ED03u * (2 * i + 1));
    }
    for (int64_t i = begin; i < end; ++i) {
      stream(to + i, value);
      value += step;
    }
    _mm_sfence();
  });
}

// A number that depends on every byte, so that no load can be dropped.
extern "C" uint64_t floor_read(const void* source, int64_t bytes, int threads) {
  std::vector<uint64_t> sums(size_t(threads) * 8);
  split(bytes, threads, [&](int t, int64_t begin, int64_t end) {
    const Line* from = static_cast<const Line*>(source);
    Line a = load(from + begin), b = a, c = a, d = a;
    for (int64_t i = begin; i < end; i += 4) {
      a = add(a, load(from + i));
      b = add(b, load(from + i + 1));
      c = add(c, load(from + i + 2));
      d = add(d, load(from + i + 3));
    }
    const Line sum = add(add(a, b), add(c, d));
    sums[size_t(t) * 8] = *reinterpret_cast<const uint64_t*>(&sum);
  });
  uint64_t total = 0;
  for (uint64_t sum : sums) total += sum;
  return total;
}
