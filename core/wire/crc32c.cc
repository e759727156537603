// CRC32C (Castagnoli): with the processor's instruction in three parallel streams, or with tables, eight bytes at a
// time. Pure, but asks for the processor's features. Touches only base/.
#include <array>
#include <cstring>

#include "wire/frame.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <nmmintrin.h>
#define FARANDOLE_CRC __attribute__((target("sse4.2,crc32")))
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#if defined(__clang__)
#define FARANDOLE_CRC __attribute__((target("crc")))
#else
#define FARANDOLE_CRC __attribute__((target("+crc")))
#endif
#endif

namespace farandole::wire {
namespace {

// Polynomials over GF(2) of degree below 32. The highest power is in the lowest bit, as in the CRC.
constexpr std::uint32_t kPolynomial = 0x82f63b78;
constexpr std::uint32_t kOne = 0x80000000;

constexpr std::uint32_t times_x(std::uint32_t a) { return (a >> 1) ^ ((a & 1) ? kPolynomial : 0); }

constexpr std::uint32_t times(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (std::uint32_t bit = kOne; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = times_x(b);
  }
  return product;
}

using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

// tables[k][byte]: the effect of a byte on the CRC when k more bytes follow it.
constexpr Tables make_byte_tables() {
  Tables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = times_x(crc);
    tables[0][byte] = crc;
  }
  for (std::size_t k = 1; k < 8; ++k) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t crc = tables[k - 1][byte];
      tables[k][byte] = (crc >> 8) ^ tables[0][crc & 0xff];
    }
  }
  return tables;
}
constexpr Tables kByte = make_byte_tables();

std::uint32_t by_tables(std::uint32_t crc, const std::byte* data, std::size_t bytes) {
  for (; bytes >= 8; data += 8, bytes -= 8) {
    std::uint32_t word[8];  // byte by byte, so that the processor's byte order does not matter
    for (int k = 0; k < 8; ++k) word[k] = std::to_integer<std::uint32_t>(data[k]);
    for (int k = 0; k < 4; ++k) word[k] ^= (crc >> (8 * k)) & 0xff;
    crc = 0;
    for (std::size_t k = 0; k < 8; ++k) crc ^= kByte[7 - k][word[k]];
  }
  for (; bytes > 0; ++data, --bytes) crc = (crc >> 8) ^ kByte[0][(crc ^ std::to_integer<std::uint32_t>(*data)) & 0xff];
  return crc;
}

#ifdef FARANDOLE_CRC

// The instruction takes three cycles, but one can start in each cycle. So three streams of kStream bytes are computed
// in parallel; the first two results are then moved over the bytes that followed, by a multiplication with x^(8 *
// kStream).
constexpr std::size_t kStream = 1024;

constexpr Tables make_forward_tables() {
  std::uint32_t power = kOne >> 8;  // x^8
  for (std::size_t n = 1; n < kStream; n *= 2) power = times(power, power);
  Tables tables{};
  for (std::size_t k = 0; k < 4; ++k) {
    for (std::uint32_t bit = 0; bit < 8; ++bit) tables[k][1u << bit] = times(1u << (8 * k + bit), power);
    for (std::size_t byte = 1; byte < 256; ++byte) {
      tables[k][byte] = tables[k][byte & (byte - 1)] ^ tables[k][byte & ~(byte - 1)];
    }
  }
  return tables;
}
constexpr Tables kForward = make_forward_tables();
static_assert((kStream & (kStream - 1)) == 0);

std::uint32_t forward(std::uint32_t crc) {
  return kForward[0][crc & 0xff] ^ kForward[1][(crc >> 8) & 0xff] ^ kForward[2][(crc >> 16) & 0xff] ^
         kForward[3][crc >> 24];
}

FARANDOLE_CRC inline std::uint32_t step(std::uint32_t crc, const std::byte* data) {
  std::uint64_t word;
  std::memcpy(&word, data, sizeof word);
#if defined(__x86_64__)
  return static_cast<std::uint32_t>(_mm_crc32_u64(crc, word));
#else
  return __crc32cd(crc, word);
#endif
}

FARANDOLE_CRC inline std::uint32_t step_byte(std::uint32_t crc, std::byte byte) {
#if defined(__x86_64__)
  return _mm_crc32_u8(crc, std::to_integer<std::uint8_t>(byte));
#else
  return __crc32cb(crc, std::to_integer<std::uint8_t>(byte));
#endif
}

FARANDOLE_CRC std::uint32_t by_instruction(std::uint32_t crc, const std::byte* data, std::size_t bytes) {
  for (; bytes >= 3 * kStream; data += 3 * kStream, bytes -= 3 * kStream) {
    std::uint32_t second = 0, third = 0;
    for (std::size_t i = 0; i < kStream; i += 8) {
      crc = step(crc, data + i);
      second = step(second, data + kStream + i);
      third = step(third, data + 2 * kStream + i);
    }
    crc = forward(forward(crc) ^ second) ^ third;
  }
  for (; bytes >= 8; data += 8, bytes -= 8) crc = step(crc, data);
  for (; bytes > 0; ++data, --bytes) crc = step_byte(crc, *data);
  return crc;
}

#endif

using Update = std::uint32_t (*)(std::uint32_t crc, const std::byte* data, std::size_t bytes);

Update best() {
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_SSE4_2) != 0) return by_instruction;
#elif defined(__aarch64__)
  if ((getauxval(AT_HWCAP) & (1ul << 7)) != 0) return by_instruction;  // HWCAP_CRC32
#endif
  return by_tables;
}

}  // namespace

std::uint32_t crc32c(std::uint32_t seed, const void* data, std::size_t bytes) {
  static const Update update = best();
  return ~update(~seed, static_cast<const std::byte*>(data), bytes);
}

std::uint32_t crc32c_by_tables(std::uint32_t seed, const void* data, std::size_t bytes) {
  return ~by_tables(~seed, static_cast<const std::byte*>(data), bytes);
}

}  // namespace farandole::wire
