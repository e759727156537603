// Sends and receives between two ranks: concurrent with collectives, not negotiated.
// Touches base/, link/ and engine/services.h. Used only by the driver.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/services.h"

namespace farandole {

class Transfers {
 public:
  explicit Transfers(Services& services) : services_(services) {}

  void begin(const OperationPtr& operation);
  bool advance();  // true when anything moved
  bool empty() const { return running_.empty() && any_source_.empty(); }
  // These end operations with the error: all of them, or those of one process set.
  void end(const Error& error);
  void end(std::int32_t group, const Error& error);

  // The process set of a message, from the group in its tag.
  static std::uint32_t group_of(std::uint32_t tag_group);

 private:
  struct Transfer {  // its bytes, and a second message with its data type
    OperationPtr operation;
    link::TransferPtr data;
    std::unique_ptr<std::uint32_t> dtype;  // this rank's for a send, the sender's for a receive
    link::TransferPtr dtype_transfer;
    bool done() const { return data->done() && dtype_transfer->done(); }
    void cancel() {
      data.reset();
      dtype_transfer.reset();
    }
    Error mismatch() const;
  };
  bool match_any_source();
  bool finish_done();

  Services& services_;
  std::vector<Transfer> running_;
  std::vector<OperationPtr> any_source_;  // receives whose source is not known yet
};

}  // namespace farandole
