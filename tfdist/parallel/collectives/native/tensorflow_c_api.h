// The functions of TensorFlow's C interface that the op uses, found in the running process.
//
// Declared here, because a build of the package has no TensorFlow: pip builds it in an environment of
// its own. TensorFlow keeps this interface stable (tensorflow/c/kernels.h, ops.h, tf_tensor.h).
#ifndef TFDIST_TENSORFLOW_C_API_H_
#define TFDIST_TENSORFLOW_C_API_H_

#include <stddef.h>
#include <stdint.h>

extern "C" {
typedef struct TF_KernelBuilder TF_KernelBuilder;
typedef struct TF_OpDefinitionBuilder TF_OpDefinitionBuilder;
typedef struct TF_OpKernelConstruction TF_OpKernelConstruction;
typedef struct TF_OpKernelContext TF_OpKernelContext;
typedef struct TF_ShapeInferenceContext TF_ShapeInferenceContext;
typedef struct TF_Status TF_Status;
typedef struct TF_Tensor TF_Tensor;
}

namespace tfdist {

constexpr int kOk = 0;        // TF_OK
constexpr int kAborted = 10;  // TF_ABORTED

// Each function: result, name without "TF_", parameters.
#define TFDIST_TENSORFLOW_FUNCTIONS(F)                                                             \
  F(TF_Status*, NewStatus, (void))                                                                 \
  F(void, DeleteStatus, (TF_Status*))                                                              \
  F(void, SetStatus, (TF_Status*, int code, const char* message))                                  \
  F(int, GetCode, (const TF_Status*))                                                              \
  F(const char*, Message, (const TF_Status*))                                                      \
  F(TF_OpDefinitionBuilder*, NewOpDefinitionBuilder, (const char* name))                           \
  F(void, OpDefinitionBuilderAddAttr, (TF_OpDefinitionBuilder*, const char*))                      \
  F(void, OpDefinitionBuilderAddInput, (TF_OpDefinitionBuilder*, const char*))                     \
  F(void, OpDefinitionBuilderAddOutput, (TF_OpDefinitionBuilder*, const char*))                    \
  F(void, OpDefinitionBuilderSetIsStateful, (TF_OpDefinitionBuilder*, bool))                       \
  F(void, OpDefinitionBuilderSetShapeInferenceFunction,                                            \
    (TF_OpDefinitionBuilder*, void (*)(TF_ShapeInferenceContext*, TF_Status*)))                    \
  F(void, RegisterOpDefinition, (TF_OpDefinitionBuilder*, TF_Status*))                             \
  F(void, ShapeInferenceContextSetUnknownShape, (TF_ShapeInferenceContext*, TF_Status*))           \
  F(TF_KernelBuilder*, NewKernelBuilder,                                                           \
    (const char* op, const char* device, void* (*create)(TF_OpKernelConstruction*),                \
     void (*compute)(void*, TF_OpKernelContext*), void (*destroy)(void*)))                         \
  F(void, RegisterKernelBuilder, (const char* name, TF_KernelBuilder*, TF_Status*))                \
  F(void, OpKernelConstruction_GetAttrInt64,                                                       \
    (TF_OpKernelConstruction*, const char* name, int64_t* value, TF_Status*))                      \
  F(void, OpKernelConstruction_GetAttrSize,                                                        \
    (TF_OpKernelConstruction*, const char* name, int32_t* count, int32_t* bytes, TF_Status*))      \
  F(void, OpKernelConstruction_GetAttrString,                                                      \
    (TF_OpKernelConstruction*, const char* name, char* value, size_t bytes, TF_Status*))           \
  F(void, OpKernelConstruction_Failure, (TF_OpKernelConstruction*, TF_Status*))                    \
  F(int, NumInputs, (TF_OpKernelContext*))                                                         \
  F(void, GetInput, (TF_OpKernelContext*, int index, TF_Tensor**, TF_Status*))                     \
  F(TF_Tensor*, AllocateOutput,                                                                    \
    (TF_OpKernelContext*, int index, int dtype, const int64_t* dims, int rank, size_t bytes,       \
     TF_Status*))                                                                                  \
  F(TF_Tensor*, ForwardInputOrAllocateOutput,                                                      \
    (TF_OpKernelContext*, const int* candidates, int count, int output, const int64_t* dims,       \
     int rank, int* forwarded, TF_Status*))                                                        \
  F(void, OpKernelContext_Failure, (TF_OpKernelContext*, TF_Status*))                              \
  F(int, TensorType, (const TF_Tensor*))                                                           \
  F(int, NumDims, (const TF_Tensor*))                                                              \
  F(int64_t, Dim, (const TF_Tensor*, int index))                                                   \
  F(size_t, TensorByteSize, (const TF_Tensor*))                                                    \
  F(void*, TensorData, (const TF_Tensor*))                                                         \
  F(void, DeleteTensor, (TF_Tensor*))

struct TensorFlow {
#define TFDIST_DECLARE(result, name, parameters) result(*name) parameters;
  TFDIST_TENSORFLOW_FUNCTIONS(TFDIST_DECLARE)
#undef TFDIST_DECLARE
};

}  // namespace tfdist
#endif  // TFDIST_TENSORFLOW_C_API_H_
