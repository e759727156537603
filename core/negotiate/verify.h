// Does a bucket match this member's requests? Checked here, before any memory is touched.
// Pure. Touches base/.
#pragma once

#include <vector>

#include "negotiate/request.h"

namespace farandole::negotiate {

// The member that receives the bucket.
struct Requester {
  const std::vector<int>& ranks;  // member -> rank in the job
  int me = 0;                     // as a member
  bool joined = false;            // it has joined, and contributes zeros for tensors that it did not submit
};

// What is wrong, as text after "a bucket that ..."; null when all is well. Checks the bucket itself, then each tensor
// against this member's own request, null where there is none. Uses no memory; takes time proportional to the tensors
// and, for kinds whose rows vary, to the members.
const char* fault_in(const Bucket& bucket, const Requester& requester);
const char* fault_in(const Bucket& bucket, const Item& item, const Request* own, const Requester& requester);

}  // namespace farandole::negotiate
