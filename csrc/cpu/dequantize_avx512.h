// What dequantize_kernel.h needs of an ISA, in AVX-512.
#pragma once

#include "kernels.h"
#include "simd/avx512.h"

namespace halfbyte::cpu {
namespace {

constexpr int64_t kDecodeGroup = 32;  // elements per call of decode and decode_8bit

// The codes of each byte, first the high nibble, at the bottom of 2 words or of 2 dwords; the bits above are waste.
#if defined(__AVX512VBMI__)
// 2 bytes become a qword of words; vpmultishiftqb puts bits 4, 0, 12 and 8 onward at the bottom of each.
inline __m512i nibbles_in_words(__m128i bytes) {
  return _mm512_multishift_epi64_epi8(_mm512_set1_epi64(0x0008000C00000004), _mm512_cvtepu16_epi64(bytes));
}
inline __m512i nibbles_in_dwords(__m128i bytes) {
  return _mm512_multishift_epi64_epi8(_mm512_set1_epi64(4), _mm512_cvtepu8_epi64(bytes));
}
#else
inline __m512i nibbles_in_words(__m128i bytes) {
  const __m512i twice = _mm512_set_epi64(0x0F0F0F0F0E0E0E0E, 0x0D0D0D0D0C0C0C0C, 0x0B0B0B0B0A0A0A0A, 0x0909090908080808,  //
                                          0x0707070706060606, 0x0505050504040404, 0x0303030302020202, 0x0101010100000000);
  return _mm512_srlv_epi16(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(bytes), twice), _mm512_set1_epi32(4));
}
inline __m512i nibbles_in_dwords(__m128i bytes) {
  const __m512i twice = _mm512_shuffle_epi32(_mm512_cvtepu8_epi64(bytes), _MM_PERM_CCAA);
  return _mm512_srlv_epi32(twice, _mm512_set1_epi64(4));
}
#endif

// The 16 values of a 4-bit codebook times a block's absmax, rounded to T (bf16 or fp16) once, twice in a row: vpermw
// reads 5 bits of index, of which the top one then does not matter.
template <class T>
struct ScaledCodebook {
  __m512i entries;

  ScaledCodebook(const float* codebook, float absmax) {
    const __m512 products = _mm512_mul_ps(_mm512_loadu_ps(codebook), _mm512_set1_ps(absmax));
    entries = narrow_floats<T>(products, products);
  }

  // 16 bytes of codes -> 32 elements.
  template <bool Stream>
  void decode(const uint8_t* codes, T* out) const {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    store_vector<Stream>(out, _mm512_permutexvar_epi16(nibbles_in_words(bytes), entries));
  }
};

template <>
struct ScaledCodebook<float> {
  __m512 entries;

  ScaledCodebook(const float* codebook, float absmax)
      : entries(_mm512_mul_ps(_mm512_loadu_ps(codebook), _mm512_set1_ps(absmax))) {}

  // 16 bytes of codes -> 32 elements.
  template <bool Stream>
  void decode(const uint8_t* codes, float* out) const {
    for (int i = 0; i < 2; ++i) {
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + 8 * i));
      store_vector<Stream>(out + 16 * i, _mm512_castps_si512(_mm512_permutexvar_ps(nibbles_in_dwords(bytes), entries)));
    }
  }
};

// 32 codes -> floats; e4m3 comes out as value / 256: its bits, moved, are that number in fp16, subnormals included.
template <bool FP8>
inline void widen_codes(const uint8_t* codes, __m512& low, __m512& high) {
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
  if (!FP8) {
    low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
    high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
    return;
  }
  // Sign-extended and shifted by 7, the sign sits in bits 15 and 14: bit 14 goes.
  const __m512i nan = _mm512_set1_epi16(int16_t(0xBF80));
  __m512i half = _mm512_and_si512(_mm512_slli_epi16(_mm512_cvtepi8_epi16(bytes), 7), nan);
  const __mmask32 is_nan = _mm512_cmpeq_epi16_mask(_mm512_or_si512(half, _mm512_set1_epi16(int16_t(0x8000))), nan);
  half = _mm512_mask_mov_epi16(half, is_nan, _mm512_set1_epi16(0x7E00));
  low = _mm512_cvtph_ps(_mm512_castsi512_si256(half));
  high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1));
}

// 32 int8 or e4m3 codes -> code * quotient.
template <class T, bool FP8, bool Stream>
inline void decode_8bit(const uint8_t* codes, float quotient, T* out) {
  // 256 * quotient is exact and finite (quotient <= FLT_MAX / 448), so the product still rounds once.
  const __m512 scale = _mm512_set1_ps(FP8 ? quotient * 256.0f : quotient);
  __m512 a, b;
  widen_codes<FP8>(codes, a, b);
  a = _mm512_mul_ps(a, scale);
  b = _mm512_mul_ps(b, scale);
  if constexpr (sizeof(T) == 4) {
    store_vector<Stream>(out, _mm512_castps_si512(a));
    store_vector<Stream>(out + 16, _mm512_castps_si512(b));
  } else {
    store_vector<Stream>(out, narrow_floats<T>(a, b));
  }
}

}  // namespace
}  // namespace halfbyte::cpu
