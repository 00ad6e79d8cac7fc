// The workspace of a thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace topkube {

// Memory that a thread keeps between calls, because fresh pages cost more than the selection from them. A large workspace is freed
// after the call.
class Workspace {
 public:
  // Returns memory for `words` words, with undefined contents.
  std::uint32_t* reserve(std::size_t words) {
    if (words > size_) {
      words_.reset();  // freed first, so that old and new memory never exist at the same time
      size_ = 0;       // stays 0 if there is no memory
      words_.reset(new std::uint32_t[words]);
      size_ = words;
    }
    return words_.get();
  }
  void trim() {
    if (size_ > (std::size_t{64} << 20) / sizeof(std::uint32_t)) {
      words_.reset();
      size_ = 0;
    }
  }

 private:
  std::unique_ptr<std::uint32_t[]> words_;
  std::size_t size_ = 0;
};

}  // namespace topkube
