// What dequantize_kernel.h needs of an ISA, in AVX2.
#pragma once

#include "kernels.h"
#include "simd/avx2.h"

namespace halfbyte::cpu {
namespace {

constexpr int64_t kDecodeGroup = 32;  // elements per call of decode and decode_8bit

// 16 words of T (BFloat16 or Float16) -> their low bytes and their high bytes, each 16 bytes in both lanes.
template <class T>
inline void split_bytes(__m256 a, __m256 b, __m256i& low, __m256i& high);
template <>
inline void split_bytes<Float16>(__m256 a, __m256 b, __m256i& low, __m256i& high) {
  const __m256i words = narrow_floats<Float16>(a, b);
  const __m256i bytes =  // low 0-7, high 0-7 | low 8-15, high 8-15
      _mm256_packus_epi16(_mm256_and_si256(words, _mm256_set1_epi16(0xFF)), _mm256_srli_epi16(words, 8));
  low = _mm256_permute4x64_epi64(bytes, 0x88);
  high = _mm256_permute4x64_epi64(bytes, 0xDD);
}
template <>
inline void split_bytes<BFloat16>(__m256 a, __m256 b, __m256i& low, __m256i& high) {
  // Bytes 2 of four dwords, then bytes 3; twice, so that a blend joins a and b.
  const __m256i gather = _mm256_broadcastsi128_si256(_mm_setr_epi8(2, 6, 10, 14, 3, 7, 11, 15, 2, 6, 10, 14, 3, 7, 11, 15));
  const __m256i bytes =  // dwords: low 0-3, high 0-3, low 8-11, high 8-11 | low 4-7, high 4-7, low 12-15, high 12-15
      _mm256_blend_epi32(_mm256_shuffle_epi8(round_bf16(a), gather), _mm256_shuffle_epi8(round_bf16(b), gather), 0xCC);
  low = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 2, 6, 0, 4, 2, 6));
  high = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(1, 5, 3, 7, 1, 5, 3, 7));
}

// The 16 values of a 4-bit codebook times a block's absmax, rounded to T (bf16 or fp16) once. vpshufb looks up bytes, so
// the table is kept as its low and its high bytes.
template <class T>
struct ScaledCodebook {
  __m256i low, high;

  ScaledCodebook(const float* codebook, float absmax) {
    const __m256 scale = _mm256_set1_ps(absmax);
    split_bytes<T>(_mm256_mul_ps(_mm256_loadu_ps(codebook), scale), _mm256_mul_ps(_mm256_loadu_ps(codebook + 8), scale), low,
                   high);
  }

  // 16 bytes of codes -> 32 elements. Each byte twice, of bytes 0-3, 8-11 | 4-7, 12-15: interleaving the bytes looked up
  // (within lanes) then leaves elements 0-15 in one vector and 16-31 in the other.
  template <bool Stream>
  void decode(const uint8_t* codes, T* out) const {
    const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    const __m256i spread = _mm256_setr_epi8(0, 0, 1, 1, 2, 2, 3, 3, 8, 8, 9, 9, 10, 10, 11, 11,  //
                                            4, 4, 5, 5, 6, 6, 7, 7, 12, 12, 13, 13, 14, 14, 15, 15);
    const __m256i bytes = _mm256_shuffle_epi8(both, spread);
    const __m256i even = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), _mm256_set1_epi16(0x000F));  // high nibbles
    const __m256i nibbles = _mm256_or_si256(even, _mm256_and_si256(bytes, _mm256_set1_epi16(0x0F00)));
    const __m256i l = _mm256_shuffle_epi8(low, nibbles), h = _mm256_shuffle_epi8(high, nibbles);
    store_vector<Stream>(out, _mm256_unpacklo_epi8(l, h));
    store_vector<Stream>(out + 16, _mm256_unpackhi_epi8(l, h));
  }
};

template <>
struct ScaledCodebook<float> {
  __m256 negative, positive;  // entries 0-7 and 8-15

  ScaledCodebook(const float* codebook, float absmax) {
    const __m256 scale = _mm256_set1_ps(absmax);
    negative = _mm256_mul_ps(_mm256_loadu_ps(codebook), scale);
    positive = _mm256_mul_ps(_mm256_loadu_ps(codebook + 8), scale);
  }

  // 16 bytes of codes -> 32 elements, 4 bytes at a time: shift each nibble to the bottom of a dword, look its low 3 bits
  // up in both halves, choose by bit 3.
  template <bool Stream>
  void decode(const uint8_t* codes, float* out) const {
    const __m256i shifts = _mm256_setr_epi32(4, 0, 12, 8, 20, 16, 28, 24);
    for (int i = 0; i < 4; ++i) {
      int32_t word;
      memcpy(&word, codes + 4 * i, 4);
      const __m256i code = _mm256_srlv_epi32(_mm256_set1_epi32(word), shifts);
      const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(code, 28));
      const __m256 values = _mm256_blendv_ps(_mm256_permutevar8x32_ps(negative, code),
                                             _mm256_permutevar8x32_ps(positive, code), upper);
      store_vector<Stream>(out + 8 * i, _mm256_castps_si256(values));
    }
  }
};

// 16 codes -> floats; e4m3 comes out as value / 256: its bits, moved, are that number in fp16, subnormals included.
template <bool FP8>
inline void widen_codes(const uint8_t* codes, __m256& low, __m256& high) {
  if (!FP8) {
    low = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes))));
    high = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + 8))));
    return;
  }
  const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  // Sign-extended and shifted by 7, the sign sits in bits 15 and 14: bit 14 goes.
  const __m256i nan = _mm256_set1_epi16(int16_t(0xBF80));
  const __m256i half = _mm256_and_si256(_mm256_slli_epi16(words, 7), nan);
  const __m256i is_nan = _mm256_cmpeq_epi16(_mm256_or_si256(half, _mm256_set1_epi16(int16_t(0x8000))), nan);
  const __m256i value = _mm256_or_si256(half, _mm256_and_si256(is_nan, _mm256_set1_epi16(0x7E00)));
  low = _mm256_cvtph_ps(_mm256_castsi256_si128(value));
  high = _mm256_cvtph_ps(_mm256_extracti128_si256(value, 1));
}

// 32 int8 or e4m3 codes -> code * quotient.
template <class T, bool FP8, bool Stream>
inline void decode_8bit(const uint8_t* codes, float quotient, T* out) {
  // 256 * quotient is exact and finite (quotient <= FLT_MAX / 448), so the product still rounds once.
  const __m256 scale = _mm256_set1_ps(FP8 ? quotient * 256.0f : quotient);
  for (int i = 0; i < 32; i += 16) {
    __m256 a, b;
    widen_codes<FP8>(codes + i, a, b);
    a = _mm256_mul_ps(a, scale);
    b = _mm256_mul_ps(b, scale);
    if constexpr (sizeof(T) == 4) {
      store_vector<Stream>(out + i, _mm256_castps_si256(a));
      store_vector<Stream>(out + i + 8, _mm256_castps_si256(b));
    } else {
      store_vector<Stream>(out + i, narrow_floats<T>(a, b));
    }
  }
}

}  // namespace
}  // namespace halfbyte::cpu
