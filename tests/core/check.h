// A test program in forty lines: TEST(name) { CHECK(...); } and a main that runs all of them or those named.
// Touches nothing of the product.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace check {

struct Case {
  const char* name;
  void (*body)();
};
inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}
struct Register {
  Register(const char* name, void (*body)()) { cases().push_back({name, body}); }
};
inline void fail(const char* file, int line, const std::string& what) {
  throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + what);
}
template <class A, class B>
void equal(const A& a, const B& b, const char* text, const char* file, int line) {
  if (a == b) return;
  std::ostringstream out;
  out << text << ": " << a << " != " << b;
  fail(file, line, out.str());
}

}  // namespace check

#define TEST(name)                                             \
  static void test_##name();                                   \
  static check::Register register_##name(#name, &test_##name); \
  static void test_##name()
#define CHECK(condition) ((condition) ? void() : check::fail(__FILE__, __LINE__, #condition))
#define CHECK_EQUAL(a, b) check::equal(a, b, #a " == " #b, __FILE__, __LINE__)
#define CHECK_THROWS(expression, type)                                          \
  do {                                                                          \
    bool thrown = false;                                                        \
    try {                                                                       \
      (void)(expression);                                                       \
    } catch (const type&) {                                                     \
      thrown = true;                                                            \
    }                                                                           \
    if (!thrown) check::fail(__FILE__, __LINE__, #expression " did not throw"); \
  } while (false)

int main(int argc, char** argv) {
  int failed = 0, passed = 0;
  for (const check::Case& test : check::cases()) {
    bool wanted = argc == 1;
    for (int i = 1; i < argc; ++i) wanted = wanted || std::strcmp(argv[i], test.name) == 0;
    if (!wanted) continue;
    try {
      test.body();
      ++passed;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "FAILED %s: %s\n", test.name, error.what());
      ++failed;
    }
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 && passed > 0 ? 0 : 1;
}
