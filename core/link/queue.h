// A queue that needs no memory while it is empty. A matcher has thousands of them, most of them always empty.
// Touches nothing.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace farandole::link {

template <class T>
class Queue {
 public:
  bool empty() const { return first_ == items_.size(); }
  std::size_t size() const { return items_.size() - first_; }
  T& front() { return items_[first_]; }
  T& back() { return items_.back(); }
  const T& back() const { return items_.back(); }
  auto begin() { return items_.begin() + static_cast<std::ptrdiff_t>(first_); }
  auto end() { return items_.end(); }

  T& push_back(T item) { return items_.emplace_back(std::move(item)); }
  // May move the other items: do not keep references to them.
  void pop_front() {
    items_[first_++] = T();
    if (2 * first_ < items_.size()) return;
    items_.erase(items_.begin(), begin());
    first_ = 0;
  }
  void erase(typename std::vector<T>::iterator item) { items_.erase(item); }
  template <class Test>
  void erase_if(Test test) {
    items_.erase(items_.begin(), begin());
    first_ = 0;
    std::erase_if(items_, test);
  }
  void clear() {
    items_.clear();
    first_ = 0;
  }

 private:
  std::vector<T> items_;
  std::size_t first_ = 0;  // items before this index are removed
};

}  // namespace farandole::link
