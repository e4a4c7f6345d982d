// What supports() says of a GPU that a build has no code for: no GPU is needed to say it.
#include <doctest/doctest.h>

#include <tuple>
#include <utility>

#include "common/require_support.h"

namespace ragged_attention {

TEST_CASE("a GPU that no build serves is not sent to rebuild") {
  for (const auto& [major, minor] : {std::pair{5, 2}, {6, 1}, {7, 0}, {7, 5}}) {
    const std::string advice = advice_for_architecture(major, minor);
    CHECK(advice.find("8.0 or later") != std::string::npos);
    CHECK(advice.find("rebuild") == std::string::npos);
  }
}

TEST_CASE("the architecture to rebuild for is one that nvcc knows, Hopper's with its own instructions") {
  for (const auto& [major, minor, architecture] : {std::tuple{8, 0, "=80-real,"},
                                                   {8, 9, "=89-real,"},
                                                   {9, 0, "=90a-real,"},
                                                   {10, 3, "=103-real,"},
                                                   {12, 1, "=121-real,"}}) {
    CHECK(advice_for_architecture(major, minor).find(architecture) != std::string::npos);
  }
}

}  // namespace ragged_attention
