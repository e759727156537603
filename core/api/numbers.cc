// Checks that the numbers of the C interface are those of the core's enums: a difference does not compile.
// Touches base/ and collective/.
#include "api/farandole.h"
#include "base/dtype.h"
#include "base/error.h"
#include "base/kind.h"
#include "collective/collective.h"

namespace farandole {

#define ONE(...) +1
#define SAME(type, name, number) static_assert(static_cast<int>(type::name) == number, #type " " #name);
#define CODE(name, NAME, number) SAME(Code, name, number)
#define KIND(name, NAME, number) SAME(Kind, name, number)
#define OP(name, NAME, number) SAME(ReduceOp, name, number)
#define ALGORITHM(name, NAME, number) SAME(collective::Algorithm, name, number)
#define DTYPE(name, NAME, number, bytes) \
  SAME(DType, name, number)              \
  static_assert(size_of(DType::name) == bytes, "bytes of " #name);

FARANDOLE_CODES(CODE)
FARANDOLE_KINDS(KIND)
FARANDOLE_OPS(OP)
FARANDOLE_ALGORITHMS(ALGORITHM)
FARANDOLE_DTYPES(DTYPE)
static_assert(FARANDOLE_KINDS(ONE) == kKinds && FARANDOLE_OPS(ONE) == kReduceOps && FARANDOLE_DTYPES(ONE) == kDTypes);

}  // namespace farandole
