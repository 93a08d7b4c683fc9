// Vector forms for avx512.
#pragma once

#include <immintrin.h>

#include "scalar.h"
