// Is a bucket an answer to what this member asked for? Looked at before any memory is touched, in this place alone.
// Pure. Touches base/.
#pragma once

#include <vector>

#include "negotiate/request.h"

namespace farandole::negotiate {

// The member that asked.
struct Asker {
  const std::vector<int>& ranks;  // member -> rank in the job
  int me = 0;                     // as a member
  bool joined = false;            // it has joined, and takes part with zeros in what it did not ask for
};

// What is wrong, in words that go on from "a bucket that ..."; null when all is well. First the bucket itself, then
// each of its tensors beside this member's own request for it, null where there is none. Costs no memory, and time that
// grows with the tensors and, for kinds whose rows vary, with the members.
const char* fault_in(const Bucket& bucket, const Asker& asker);
const char* fault_in(const Bucket& bucket, const Item& item, const Request* own, const Asker& asker);

}  // namespace farandole::negotiate
