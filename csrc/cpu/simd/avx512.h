// Vector forms for avx512.
#pragma once

// GCC 12 and 13 warn about the deliberately undefined operands inside their own header (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include "scalar.h"
