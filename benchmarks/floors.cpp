// The bandwidths that CPU kernels are judged against, compiled by harness.py with -march=native: a copy with non-temporal
// stores (no read of the lines it overwrites), a read, and such stores alone. Threads are fresh per call (about 30 us, so measure
// tens of megabytes): an OpenMP pool here would spin beside torch's.
#include <immintrin.h>

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

}  // namespace

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
