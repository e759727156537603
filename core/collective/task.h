// Task: a collective as a coroutine. It runs until a link would block, and continues when it is advanced again.
// Touches only base/.
#pragma once

#include <coroutine>
#include <exception>
#include <utility>

namespace farandole {

// A coroutine that is polled. `co_await until([&] { return ...; })` suspends until the condition is true; `co_await
// task` runs another Task to its end inside this one. The owner of the outermost Task calls advance() again and again.
// Destroying a Task cancels it.
class Task {
 public:
  struct promise_type;
  using Handle = std::coroutine_handle<promise_type>;

  struct Condition {
    virtual bool holds() = 0;  // does not throw: an exception is stored and rethrown in the coroutine that waits

   protected:
    ~Condition() = default;
  };

  // Shared by a chain of nested tasks: the innermost one, and its condition.
  struct Stack {
    std::coroutine_handle<> top;
    Condition* waiting = nullptr;
  };

  struct promise_type {
    Stack* stack = nullptr;
    std::coroutine_handle<> caller;  // null for the outermost
    std::exception_ptr error;

    Task get_return_object() { return Task(Handle::from_promise(*this)); }
    std::suspend_always initial_suspend() noexcept { return {}; }
    struct Final {
      bool await_ready() noexcept { return false; }
      std::coroutine_handle<> await_suspend(Handle self) noexcept {
        promise_type& promise = self.promise();
        if (!promise.caller) return std::noop_coroutine();
        promise.stack->top = promise.caller;
        return promise.caller;
      }
      void await_resume() noexcept {}
    };
    Final final_suspend() noexcept { return {}; }
    void return_void() {}
    void unhandled_exception() { error = std::current_exception(); }
  };

  Task() = default;
  Task(Task&& other) noexcept : handle_(std::exchange(other.handle_, {})) {}
  Task& operator=(Task&& other) noexcept {
    if (this != &other) {
      if (handle_) handle_.destroy();
      handle_ = std::exchange(other.handle_, {});
    }
    return *this;
  }
  ~Task() {
    if (handle_) handle_.destroy();
  }
  Handle handle() const { return handle_; }
  explicit operator bool() const { return static_cast<bool>(handle_); }

  // co_await task
  bool await_ready() const { return false; }
  std::coroutine_handle<> await_suspend(Handle caller) {
    promise_type& promise = handle_.promise();
    promise.stack = caller.promise().stack;
    promise.caller = caller;
    promise.stack->top = handle_;
    return handle_;
  }
  void await_resume() {
    if (handle_.promise().error) std::rethrow_exception(handle_.promise().error);
  }

 private:
  explicit Task(Handle handle) : handle_(handle) {}
  Handle handle_;
};

// The owner's view of an outermost Task.
class Running {
 public:
  explicit Running(Task task) : task_(std::move(task)) {
    task_.handle().promise().stack = &stack_;
    stack_.top = task_.handle();
  }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

  // Runs as far as it can. True when it has finished; throws the body's exception. `moved` is set when anything was
  // done.
  bool advance(bool& moved) {
    while (!task_.handle().done()) {
      if (stack_.waiting != nullptr) {
        if (!stack_.waiting->holds()) return false;
        stack_.waiting = nullptr;
      }
      moved = true;
      stack_.top.resume();
    }
    if (task_.handle().promise().error) std::rethrow_exception(task_.handle().promise().error);
    return true;
  }

 private:
  Task task_;
  Task::Stack stack_;
};

template <class Predicate>
class Until final : public Task::Condition {
 public:
  explicit Until(Predicate predicate) : predicate_(std::move(predicate)) {}
  bool holds() override {
    try {
      return predicate_();
    } catch (...) {
      // A second call might not throw: the condition may read a peer's memory.
      error_ = std::current_exception();
      return true;
    }
  }
  bool await_ready() { return predicate_(); }
  void await_suspend(Task::Handle self) { self.promise().stack->waiting = this; }
  void await_resume() {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  Predicate predicate_;
  std::exception_ptr error_;
};

// co_await pause: continues at the next advance(), so that a task that never waits lets others run.
class Pause final : public Task::Condition {
 public:
  bool holds() override { return std::exchange(seen_, true); }
  bool await_ready() { return false; }
  void await_suspend(Task::Handle self) {
    seen_ = false;
    self.promise().stack->waiting = this;
  }
  void await_resume() {}

 private:
  bool seen_ = false;
};

// co_await turns: gives each of two tasks a turn, until one of them can continue or both have ended.
class Turns final : public Task::Condition {
 public:
  Turns(Task first, Task second) : first_(std::move(first)), second_(std::move(second)) {}
  bool over() const { return over_; }

  bool holds() override {
    bool moved = false;
    try {
      bool first_over = first_.advance(moved);
      over_ = second_.advance(moved) && first_over;
    } catch (...) {
      error_ = std::current_exception();
      return true;
    }
    return moved || over_;
  }
  bool await_ready() { return false; }
  void await_suspend(Task::Handle self) { self.promise().stack->waiting = this; }
  void await_resume() {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  Running first_;
  Running second_;
  bool over_ = false;
  std::exception_ptr error_;
};

// Two tasks side by side; each may wait for the other.
inline Task side_by_side(Task first, Task second) {
  Turns turns(std::move(first), std::move(second));
  Pause pause;
  while (true) {
    co_await turns;
    if (turns.over()) co_return;
    co_await pause;  // first lets the links send what the tasks have posted
  }
}

template <class Predicate>
Until<Predicate> until(Predicate predicate) {
  return Until<Predicate>(std::move(predicate));
}

}  // namespace farandole
