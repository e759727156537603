// Buckets of tensors in the memory of GPUs: on the device where all members of one host can, else through pinned host
// memory.
// Touches collective/, cuda/ and negotiate/.
#pragma once

#include "engine/execute.h"

namespace farandole {

// The collective of a bucket that the members have agreed to be of device tensors, or of which this member's tensors
// lie on a device. The other tensors may be in host memory.
Task device_task(Job& job, collective::Context context);

}  // namespace farandole
