// CRC32C: by the processor's own instruction where it has one, by tables elsewhere.
// Pure. Touches base/ alone.
#include <array>
#include <cstring>

#include "wire/frame.h"

#if defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace farandole::wire {

namespace {

// table[k][b]: the CRC of byte b followed by k zero bytes, so that eight bytes are looked up at once.
using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr Tables make_tables() {
  Tables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78u : 0u);
    tables[0][byte] = crc;
  }
  for (std::size_t k = 1; k < 8; ++k) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 0xff];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

std::uint32_t by_tables(std::uint32_t crc, const unsigned char* data, std::size_t bytes) {
  for (; bytes >= 8; data += 8, bytes -= 8) {
    const std::uint32_t low = crc ^ (data[0] | data[1] << 8 | data[2] << 16 | std::uint32_t{data[3]} << 24);
    crc = kTables[7][low & 0xff] ^ kTables[6][low >> 8 & 0xff] ^ kTables[5][low >> 16 & 0xff] ^ kTables[4][low >> 24] ^
          kTables[3][data[4]] ^ kTables[2][data[5]] ^ kTables[1][data[6]] ^ kTables[0][data[7]];
  }
  for (; bytes > 0; ++data, --bytes) crc = (crc >> 8) ^ kTables[0][(crc ^ *data) & 0xff];
  return crc;
}

using Update = std::uint32_t (*)(std::uint32_t crc, const unsigned char* data, std::size_t bytes);

#if defined(__aarch64__)

__attribute__((target("+crc"))) std::uint32_t by_instruction(std::uint32_t crc, const unsigned char* data,
                                                             std::size_t bytes) {
  for (; bytes >= 8; data += 8, bytes -= 8) {
    std::uint64_t word;
    std::memcpy(&word, data, 8);
    crc = __crc32cd(crc, word);
  }
  for (; bytes > 0; ++data, --bytes) crc = __crc32cb(crc, *data);
  return crc;
}

Update pick() { return (getauxval(AT_HWCAP) & (1ul << 7)) != 0 ? &by_instruction : &by_tables; }  // HWCAP_CRC32

#elif defined(__x86_64__)

__attribute__((target("sse4.2,crc32"))) std::uint32_t by_instruction(std::uint32_t crc, const unsigned char* data,
                                                               std::size_t bytes) {
  std::uint64_t wide = crc;
  for (; bytes >= 8; data += 8, bytes -= 8) {
    std::uint64_t word;
    std::memcpy(&word, data, 8);
    wide = _mm_crc32_u64(wide, word);
  }
  crc = static_cast<std::uint32_t>(wide);
  for (; bytes > 0; ++data, --bytes) crc = _mm_crc32_u8(crc, *data);
  return crc;
}

Update pick() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("sse4.2") != 0 ? &by_instruction : &by_tables;
}

#else

Update pick() { return &by_tables; }

#endif

}  // namespace

std::uint32_t crc32c(std::uint32_t seed, const void* data, std::size_t bytes) {
  static const Update update = pick();
  return ~update(~seed, static_cast<const unsigned char*>(data), bytes);
}

std::uint32_t crc32c_by_tables(std::uint32_t seed, const void* data, std::size_t bytes) {
  return ~by_tables(~seed, static_cast<const unsigned char*>(data), bytes);
}

}  // namespace farandole::wire
