// Vector forms for avx2.
#pragma once

#include <immintrin.h>

#include "scalar.h"
