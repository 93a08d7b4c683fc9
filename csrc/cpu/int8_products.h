// What int8_linear's products have in common, with VNNI and without. Included once per ISA, after int8_vectors_<isa>.h.
#pragma once

namespace halfbyte::cpu {
namespace {

struct Int8Vectors {
  using Values = Bytes;
  using Sum = Int32s;
  static Sum zero() { return Sum{}; }
  static int32_t total(Sum sum) { return sum_of_lanes(sum); }
  static void totals(const Sum sums[4], int32_t out[4]) { sums_of_lanes(sums[0], sums[1], sums[2], sums[3], out); }
  static Sum load_sums(const float* p) {
    Sum v;
    memcpy(&v, p, sizeof v);
    return v;
  }
  static void store_sums(float* p, Sum v) { memcpy(p, &v, sizeof v); }
  static Vector as_units(Bytes codes) {
    Vector v;
    memcpy(&v, &codes, sizeof v);
    return v;
  }
  static Values load(const float* p) { return load_bytes(p); }
  static Values broadcast(const float* p) { return broadcast_unit(p); }
};

}  // namespace
}  // namespace halfbyte::cpu
